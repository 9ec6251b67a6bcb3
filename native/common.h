// What the kernels share: bits of floats, the split master, and one contiguous range per thread.
//
// Header of `adamw.cpp` and `formats.cpp`, which say what their loops are for. Everything here is inlined into those loops, so
// that each clone vectorises it for its own level.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef _OPENMP
#include <omp.h>
#endif

// One library serves every x86-64: the loader picks the clone. Feature levels, not CPU names, or AMD would miss them.
// The tests define LAYERFERRY_NO_CLONES and build one level at a time.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && !defined(LAYERFERRY_NO_CLONES)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

namespace {

constexpr int64_t kAlignElements = 128;    // threads begin on 256-byte boundaries of the narrowest plane
constexpr int64_t kMinPerThread = 1 << 14;  // fewer elements than this do not pay for waking a thread
constexpr float kSmallestNormal = 1.17549435e-38f;
constexpr uint32_t kQuietNan = 0x7fc00000u;

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float widen(uint16_t bf16) { return from_bits(static_cast<uint32_t>(bf16) << 16); }
inline float widen(float value) { return value; }

inline float join(uint16_t weight, int16_t residue) {
    return from_bits((static_cast<uint32_t>(weight) << 16) + static_cast<uint32_t>(static_cast<int32_t>(residue)));
}

inline void split(float master, uint16_t &weight, int16_t &residue) {
    const uint32_t bits = master == master ? to_bits(master) : kQuietNan;
    const uint32_t high = (bits + 0x8000u) >> 16;
    weight = static_cast<uint16_t>(high);
    residue = static_cast<int16_t>(static_cast<uint16_t>(bits - (high << 16)));
}

inline float without_denormals(float value) { return std::fabs(value) < kSmallestNormal ? 0.0f : value; }

// One contiguous range per thread; every update is elementwise or by blocks of kAlignElements, so the cut never changes a bit.
template <typename Range>
void parallel(int64_t count, int threads, const Range &range) {
#ifdef _OPENMP
    const int64_t useful = count / kMinPerThread + 1;
    const int team = static_cast<int>(threads < useful ? threads : useful);
    if (team > 1) {
#pragma omp parallel num_threads(team)
        {
            const int64_t members = omp_get_num_threads(), member = omp_get_thread_num();
            const int64_t blocks = (count + kAlignElements - 1) / kAlignElements;
            const int64_t start = blocks * member / members * kAlignElements;
            const int64_t stop = member + 1 == members ? count : blocks * (member + 1) / members * kAlignElements;
            range(start, stop - start);
        }
        return;
    }
#else
    (void)threads;
#endif
    range(0, count);
}

}  // namespace
