// AdamW over (pointer, count): one pass over all planes of a span, C ABI, no Python or torch headers.
//
// What for: the step is bound by memory traffic, so everything that touches a parameter (clip coefficient, moments, bias
// corrections, weight decay, the cast back to bf16) belongs to one pass. `layerferry/optim/reference.py` is the same arithmetic in
// torch, operation by operation; `tests/optim/test_kernels.py` holds the two to the same bits, for every clone below.
//
// Numbers. fp32 throughout, one rounding per written operation: built with -ffp-contract=off, because a fused multiply-add in some
// clones only would make the bits depend on the CPU. A master weight is kept as two planes: `weight`, its bf16 value rounded half up
// on the bits, and `residue`, the signed 16-bit rest; master bits = (weight << 16) + residue, exact for every value. NaN becomes the
// one quiet NaN first, since rounding an all-ones NaN up would wrap to -0.0. Moments below the smallest normal number are stored as
// zero: a row that gets one gradient and never another would otherwise crawl through denormals for ever, eight times slower.
//
// Speed. A division and a root per element keep one core's divider about as busy as its memory port, so the tiles to come are
// prefetched: 15 % on one thread. Left out: non-temporal stores (all but the gradient is updated in place), NUMA.

#include "common.h"

// Mirrors AdamWScalars in layerferry/optim/rules.py: computed there in double, rounded to fp32 once.
struct Scalars {
    float grad_scale;
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float rsqrt_bias_correction2;
    float eps;
    float step_size;
    float decay;
};

namespace {

// The update itself: moments in place, the new master returned.
inline float adamw(float master, float grad, float &exp_avg, float &exp_avg_sq, const Scalars &s) {
    const float scaled = grad * s.grad_scale;
    const float m = without_denormals(s.beta1 * exp_avg + s.one_minus_beta1 * scaled);
    const float v = without_denormals(s.beta2 * exp_avg_sq + s.one_minus_beta2 * scaled * scaled);
    exp_avg = m;
    exp_avg_sq = v;
    const float denominator = std::sqrt(v) * s.rsqrt_bias_correction2 + s.eps;
    return master - (s.step_size * (m / denominator) + s.decay * master);
}

// Elements are worked on in tiles of whole cache lines; `ahead` asks for the tile that will be needed a little later.
constexpr int64_t kTile = 64;
constexpr int64_t kAhead = 1024;  // elements: 14 KiB of the five planes, the best of 256 to 4096 on a busy machine
constexpr uintptr_t kLineBytes = 64;

// TRAP: gcc takes a function that only prefetches for one without effect and drops its calls, unless it is inlined at once.
template <typename Element>
__attribute__((always_inline)) inline void prefetch_ahead(int64_t tile, const Element *array) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(array) + static_cast<uintptr_t>(tile + kAhead) * sizeof(Element);
    for (uintptr_t offset = 0; offset < kTile * sizeof(Element); offset += kLineBytes)
        __builtin_prefetch(reinterpret_cast<const void *>(start + offset), 1);
}

template <typename... Arrays>
__attribute__((always_inline)) inline void ahead(int64_t tile, const Arrays *...arrays) {
    (prefetch_ahead(tile, arrays), ...);
}

inline int64_t tile_end(int64_t tile, int64_t count) { return tile + kTile < count ? tile + kTile : count; }

// Ranges: the loops that are vectorised and cloned. Arguments by value and __restrict__, so that nothing is reloaded.

CLONES void split_bf16_range(uint16_t *__restrict__ weight, int16_t *__restrict__ residue, const uint16_t *__restrict__ grad,
                             float *__restrict__ exp_avg, float *__restrict__ exp_avg_sq, int64_t count, const Scalars s) {
    for (int64_t tile = 0; tile < count; tile += kTile) {
        ahead(tile, weight, residue, grad, exp_avg, exp_avg_sq);
        for (int64_t i = tile; i < tile_end(tile, count); ++i)
            split(adamw(join(weight[i], residue[i]), widen(grad[i]), exp_avg[i], exp_avg_sq[i], s), weight[i], residue[i]);
    }
}

CLONES void split_fp32_range(uint16_t *__restrict__ weight, int16_t *__restrict__ residue, const float *__restrict__ grad,
                             float *__restrict__ exp_avg, float *__restrict__ exp_avg_sq, int64_t count, const Scalars s) {
    for (int64_t tile = 0; tile < count; tile += kTile) {
        ahead(tile, weight, residue, grad, exp_avg, exp_avg_sq);
        for (int64_t i = tile; i < tile_end(tile, count); ++i)
            split(adamw(join(weight[i], residue[i]), widen(grad[i]), exp_avg[i], exp_avg_sq[i], s), weight[i], residue[i]);
    }
}

CLONES void fp32_range(float *__restrict__ weight, const float *__restrict__ grad, float *__restrict__ exp_avg,
                       float *__restrict__ exp_avg_sq, int64_t count, const Scalars s) {
    for (int64_t tile = 0; tile < count; tile += kTile) {
        ahead(tile, weight, grad, exp_avg, exp_avg_sq);
        for (int64_t i = tile; i < tile_end(tile, count); ++i)
            weight[i] = adamw(weight[i], grad[i], exp_avg[i], exp_avg_sq[i], s);
    }
}

CLONES void split_range(const float *__restrict__ master, uint16_t *__restrict__ weight, int16_t *__restrict__ residue,
                        int64_t count) {
    for (int64_t i = 0; i < count; ++i) split(master[i], weight[i], residue[i]);
}

CLONES void join_range(const uint16_t *__restrict__ weight, const int16_t *__restrict__ residue, float *__restrict__ master,
                       int64_t count) {
    for (int64_t i = 0; i < count; ++i) master[i] = join(weight[i], residue[i]);
}

// Not prefetched: without arithmetic in the way that costs 2 %.
CLONES void ceiling_range(uint16_t *__restrict__ weight, int16_t *__restrict__ residue, const uint16_t *__restrict__ grad,
                          float *__restrict__ exp_avg, float *__restrict__ exp_avg_sq, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        weight[i] = static_cast<uint16_t>(weight[i] ^ grad[i]);
        residue[i] = static_cast<int16_t>(residue[i] ^ 1);
        exp_avg[i] = exp_avg[i] + 1.0f;
        exp_avg_sq[i] = exp_avg_sq[i] + 1.0f;
    }
}

}  // namespace

extern "C" {

void layerferry_adamw_split_bf16(uint16_t *weight, int16_t *residue, const uint16_t *grad, float *exp_avg, float *exp_avg_sq,
                                 int64_t count, const Scalars *scalars, int threads) {
    parallel(count, threads, [=](int64_t start, int64_t length) {
        split_bf16_range(weight + start, residue + start, grad + start, exp_avg + start, exp_avg_sq + start, length, *scalars);
    });
}

void layerferry_adamw_split_fp32(uint16_t *weight, int16_t *residue, const float *grad, float *exp_avg, float *exp_avg_sq,
                                 int64_t count, const Scalars *scalars, int threads) {
    parallel(count, threads, [=](int64_t start, int64_t length) {
        split_fp32_range(weight + start, residue + start, grad + start, exp_avg + start, exp_avg_sq + start, length, *scalars);
    });
}

void layerferry_adamw_fp32(float *weight, const float *grad, float *exp_avg, float *exp_avg_sq, int64_t count,
                           const Scalars *scalars, int threads) {
    parallel(count, threads, [=](int64_t start, int64_t length) {
        fp32_range(weight + start, grad + start, exp_avg + start, exp_avg_sq + start, length, *scalars);
    });
}

void layerferry_split(const float *master, uint16_t *weight, int16_t *residue, int64_t count, int threads) {
    parallel(count, threads, [=](int64_t start, int64_t length) {
        split_range(master + start, weight + start, residue + start, length);
    });
}

void layerferry_join(const uint16_t *weight, const int16_t *residue, float *master, int64_t count, int threads) {
    parallel(count, threads, [=](int64_t start, int64_t length) {
        join_range(weight + start, residue + start, master + start, length);
    });
}

// The bytes of layerferry_adamw_split_bf16 (26 per parameter: 14 read, 12 written, in place) with next to no arithmetic:
// what the memory can give for this access pattern. For benchmarks/adamw.py.
void layerferry_ceiling(uint16_t *weight, int16_t *residue, const uint16_t *grad, float *exp_avg, float *exp_avg_sq, int64_t count,
                        int threads) {
    parallel(count, threads, [=](int64_t start, int64_t length) {
        ceiling_range(weight + start, residue + start, grad + start, exp_avg + start, exp_avg_sq + start, length);
    });
}

}  // extern "C"
