// A master in each of its formats from bytes to fp32 and back, and the random bits with which it is rounded.
//
// Header of `formats.cpp`, which says what the formats are for, and of `adafactor.cpp`. `load_master`, `store_master` and
// `random_words` of `layerferry/optim` are the same in torch. All of it is inlined, so that each clone vectorises it for its level.

#pragma once

#include "common.h"

#define INLINE __attribute__((always_inline)) inline
#define INLINE_CALL __attribute__((always_inline))  // of a lambda

namespace {

constexpr int64_t kBlock = kAlignElements;

enum Master : int32_t { kWhole, kSplit16, kSplit8, kBf16 };

// Of a span or a parameter.
struct MasterPlanes {
    void *weight;   // float (kWhole), else bf16
    void *residue;  // int16 (kSplit16), int8 (kSplit8), else null
    int32_t master;
};

// ---- random bits

INLINE uint32_t hashed(uint32_t x) {  // Wellons' lowbias32
    x ^= x >> 16;
    x *= 0x21f0aaadu;
    x ^= x >> 15;
    x *= 0x735a2d97u;
    return x ^ (x >> 15);
}

// What tells the elements of a block apart, whatever the block.
struct alignas(64) Lanes {
    uint32_t words[kBlock];
    Lanes() {
        for (uint32_t i = 0; i < kBlock; ++i) words[i] = hashed(i * 0x9e3779b9u);
    }
};

// A block has two words, which stir those of the lanes: one multiplication an element. `number` counts blocks in the section.
struct Stir {
    uint32_t key, factor;
    Stir(int64_t number, uint32_t key_low, uint32_t key_high) {
        const uint64_t counter = static_cast<uint64_t>(number);
        key = hashed(hashed(static_cast<uint32_t>(counter) + key_low) + static_cast<uint32_t>(counter >> 32) + key_high);
        factor = hashed(key + 0x9e3779b9u) | 1u;
    }
};

INLINE void draw(uint32_t *__restrict__ random, const Lanes &lanes, int64_t number, uint32_t key_low, uint32_t key_high) {
    const Stir stir(number, key_low, key_high);
    for (int64_t i = 0; i < kBlock; ++i) {
        const uint32_t word = (lanes.words[i] ^ stir.key) * stir.factor;
        random[i] = word ^ (word >> 16);
    }
}

// ---- masters

INLINE void split24(float master, uint32_t random, uint16_t &weight, int8_t &residue) {
    const uint32_t bits = master == master ? to_bits(master) : kQuietNan;
    const uint32_t kept = (bits + ((random >> 4) & 0xffu)) >> 8;  // 24 bits; the last 8 are the residue's own
    weight = static_cast<uint16_t>((kept + 0x80u) >> 8);
    residue = static_cast<int8_t>(static_cast<uint8_t>(kept));
}

INLINE void load_master(const MasterPlanes &p, int64_t at, int64_t count, float *__restrict__ master) {
    if (p.master == kWhole) {
        std::memcpy(master, static_cast<const float *>(p.weight) + at, static_cast<size_t>(count) * sizeof(float));
        return;
    }
    const uint16_t *__restrict__ weight = static_cast<const uint16_t *>(p.weight) + at;
    if (p.master == kSplit16) {
        const int16_t *__restrict__ residue = static_cast<const int16_t *>(p.residue) + at;
        for (int64_t i = 0; i < count; ++i) master[i] = join(weight[i], residue[i]);
    } else if (p.master == kSplit8) {
        const int8_t *__restrict__ residue = static_cast<const int8_t *>(p.residue) + at;
        for (int64_t i = 0; i < count; ++i)
            master[i] = from_bits((static_cast<uint32_t>(weight[i]) << 16) + (static_cast<uint32_t>(static_cast<int32_t>(residue[i])) << 8));
    } else {
        for (int64_t i = 0; i < count; ++i) master[i] = widen(weight[i]);
    }
}

// `random` is read where bits are dropped: kSplit8 and kBf16.
INLINE void store_master(const MasterPlanes &p, int64_t at, int64_t count, const float *__restrict__ master,
                         const uint32_t *__restrict__ random) {
    if (p.master == kWhole) {
        std::memcpy(static_cast<float *>(p.weight) + at, master, static_cast<size_t>(count) * sizeof(float));
        return;
    }
    uint16_t *__restrict__ weight = static_cast<uint16_t *>(p.weight) + at;
    if (p.master == kSplit16) {
        int16_t *__restrict__ residue = static_cast<int16_t *>(p.residue) + at;
        for (int64_t i = 0; i < count; ++i) split(master[i], weight[i], residue[i]);
    } else if (p.master == kSplit8) {
        int8_t *__restrict__ residue = static_cast<int8_t *>(p.residue) + at;
        for (int64_t i = 0; i < count; ++i) split24(master[i], random[i], weight[i], residue[i]);
    } else {
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t bits = master[i] == master[i] ? to_bits(master[i]) : kQuietNan;
            weight[i] = static_cast<uint16_t>((bits + (random[i] & 0xffffu)) >> 16);
        }
    }
}

// ---- gradients

INLINE void load_grad(const void *plane, bool is_fp32, int64_t at, int64_t count, float *__restrict__ grad) {
    if (is_fp32) {
        std::memcpy(grad, static_cast<const float *>(plane) + at, static_cast<size_t>(count) * sizeof(float));
        return;
    }
    const uint16_t *__restrict__ given = static_cast<const uint16_t *>(plane) + at;
    for (int64_t i = 0; i < count; ++i) grad[i] = widen(given[i]);
}

}  // namespace
