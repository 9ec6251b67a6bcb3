// One pass of any update rule over planes of any format: blocks of 128 elements, from bytes to fp32 and back, C ABI.
//
// What for: a format with fewer bytes (8-bit moments, a 24-bit or bf16 master) moves half of AdamW's traffic, and every rule would
// otherwise need a kernel for each format. Here a block is loaded into fp32 arrays that stay in the first cache, the rule works on
// those, and the block is stored: formats and rules add up instead of multiplying. `layerferry/optim/reference.py` is the same in
// torch, operation by operation; `tests/optim/test_formats.py` holds the two to the same bits, for every clone.
//
// Moments of 8 bits are the top bits of the fp32 number itself, three of them mantissa, with the exponent counted from the block's
// own: a logarithmic code without tables (block-wise quantisation: Dettmers et al., arXiv 2110.02861; there with a table).
// exp_avg: sign, 16 octaves below the block's largest, zero below that. exp_avg_sq: no sign, 32 octaves, and never zero unless the
// number is, because the update divides by its root. A block's exponent is one byte. See `layerferry/optim/blocks.py`.
//
// What is dropped is rounded stochastically: a moment that moves by a thousandth of itself in a step, or a weight by less than its
// last bit, would otherwise stand still for ever. The random bits are a hash of key (seed, step, unit) and element: no state, so
// threads, order and resumption do not matter.

#include "lean512.h"

namespace {

constexpr int kNumbers = 9;
constexpr int64_t kAhead = 8 * kBlock;
constexpr int64_t kLineBytes = 64;

enum Rule : int32_t { kAdamW, kLion, kSgd, kMomentum, kDescent };

}  // namespace

// Mirrors _Update in layerferry/optim/native_kernels.py.
struct Update {
    void *weight;    // float (kWhole), else bf16
    void *residue;   // int16 (kSplit16), int8 (kSplit8), else null
    void *grad;      // written by kMomentum alone
    void *first;     // float, or codes where first_exponents is set; null where the rule has no such moment
    uint8_t *first_exponents;
    void *second;
    uint8_t *second_exponents;
    int64_t count;   // elements: whole blocks
    int64_t start;   // place of the first element in its section: what the random numbers are counted by
    uint32_t key_low;
    uint32_t key_high;
    int32_t rule;
    int32_t master;
    int32_t grad_is_fp32;
    float numbers[kNumbers];  // of the rule, computed in double, rounded to fp32 once
};

namespace {

// Bits by element: exp_avg takes the upper 20, exp_avg_sq the lower 20, the master 8 or 16 of those that weigh least in exp_avg_sq.
struct alignas(64) Block {
    float master[kBlock], grad[kBlock], first[kBlock], second[kBlock];
    uint32_t random[kBlock];
};

// ---- moments of 8 bits

constexpr int kSignedOctaves = 16, kUnsignedOctaves = 32;

INLINE void decode_signed(const uint8_t *__restrict__ codes, uint8_t exponent, float *__restrict__ values) {
    const uint32_t base = (static_cast<uint32_t>(exponent) + 1) << 23;
    for (int64_t i = 0; i < kBlock; ++i) {
        const uint32_t code = static_cast<uint32_t>(static_cast<int32_t>(static_cast<int8_t>(codes[i])));
        const uint32_t magnitude = (code << 20) & 0x07f00000u;
        values[i] = from_bits((magnitude ? magnitude + base : 0u) | (code & 0x80000000u));
    }
}

INLINE void decode_unsigned(const uint8_t *__restrict__ codes, uint8_t exponent, float *__restrict__ values) {
    const uint32_t base = (static_cast<uint32_t>(exponent) + 1) << 23;
    for (int64_t i = 0; i < kBlock; ++i) {
        const uint32_t code = codes[i];
        values[i] = from_bits(code ? (code << 20) + base : 0u);
    }
}

INLINE int32_t largest_bits(const float *__restrict__ values) {
    int32_t largest = 0;
    for (int64_t i = 0; i < kBlock; ++i) {
        const int32_t bits = static_cast<int32_t>(to_bits(values[i]) & 0x7fffffffu);
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

// The exponent byte whose highest code is not below the block's largest number. A block with a NaN is worked on twice: its NaN
// become the quiet one, and no other block pays for that.
INLINE int32_t block_exponent(float *__restrict__ values, int octaves) {
    int32_t largest = largest_bits(values);
    if (largest > 0x7f800000) {
        for (int64_t i = 0; i < kBlock; ++i) values[i] = values[i] == values[i] ? values[i] : from_bits(kQuietNan);
        largest = largest_bits(values);
    }
    const int32_t exponent = ((largest + 0xfffff) >> 23) - octaves;
    return exponent > 0 ? exponent : 0;
}

INLINE uint8_t encoded_signed(uint32_t bits, uint32_t random, int32_t below) {
    const int32_t code = static_cast<int32_t>(((bits & 0x7fffffffu) + (random >> 12)) >> 20) - below;
    return static_cast<uint8_t>(static_cast<uint32_t>(code > 0 ? code : 0) | ((bits >> 24) & 0x80u));
}

INLINE uint8_t encoded_unsigned(uint32_t bits, uint32_t random, int32_t below) {
    const int32_t code = static_cast<int32_t>((bits + (random & 0xfffffu)) >> 20) - below;
    const int32_t positive = code > 1 ? code : 1;
    return static_cast<uint8_t>(bits ? positive : 0);
}

INLINE uint8_t encode_signed(float *__restrict__ values, const uint32_t *__restrict__ random, uint8_t *__restrict__ codes) {
    const int32_t exponent = block_exponent(values, kSignedOctaves);
    const int32_t below = (exponent + 1) << 3;
    for (int64_t i = 0; i < kBlock; ++i) codes[i] = encoded_signed(to_bits(values[i]), random[i], below);
    return static_cast<uint8_t>(exponent);
}

INLINE uint8_t encode_unsigned(float *__restrict__ values, const uint32_t *__restrict__ random, uint8_t *__restrict__ codes) {
    const int32_t exponent = block_exponent(values, kUnsignedOctaves);
    const int32_t below = (exponent + 1) << 3;
    for (int64_t i = 0; i < kBlock; ++i) codes[i] = encoded_unsigned(to_bits(values[i]), random[i], below);
    return static_cast<uint8_t>(exponent);
}

// ---- gradients

// A number that bf16 holds, to the nearest, ties to even.
INLINE float nearest_bf16(float value) {
    const uint32_t bits = value == value ? to_bits(value) : kQuietNan;
    return from_bits((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

INLINE void store_grad(const Update &u, int64_t at, const float *__restrict__ grad) {
    if (u.grad_is_fp32) {
        std::memcpy(static_cast<float *>(u.grad) + at, grad, kBlock * sizeof(float));
        return;
    }
    uint16_t *__restrict__ left = static_cast<uint16_t *>(u.grad) + at;
    for (int64_t i = 0; i < kBlock; ++i) left[i] = static_cast<uint16_t>(to_bits(grad[i]) >> 16);
}

// ---- rules; numbers in the order of the Scalars classes of layerferry/optim/rules.py

INLINE void adamw_moments(Block &b, const float *n) {
    const float grad_scale = n[0], beta1 = n[1], one_minus_beta1 = n[2], beta2 = n[3], one_minus_beta2 = n[4];
    for (int64_t i = 0; i < kBlock; ++i) {
        const float scaled = b.grad[i] * grad_scale;
        const float m = without_denormals(beta1 * b.first[i] + one_minus_beta1 * scaled);
        const float sum = beta2 * b.second[i] + one_minus_beta2 * scaled * scaled;
        b.first[i] = m;
        b.second[i] = sum < kSmallestNormal ? 0.0f : sum;  // it is not negative
    }
}

INLINE float adamw_master(float master, float m, float v, const float *n) {
    const float rsqrt_bias_correction2 = n[5], eps = n[6], step_size = n[7], decay = n[8];
    const float denominator = std::sqrt(v) * rsqrt_bias_correction2 + eps;
    return master - (step_size * (m / denominator) + decay * master);
}

INLINE void adamw(Block &b, const float *n) {
    adamw_moments(b, n);
    for (int64_t i = 0; i < kBlock; ++i) b.master[i] = adamw_master(b.master[i], b.first[i], b.second[i], n);
}

// The leanest AdamW once more, from moments to bytes in one loop: the integers of the codes fill the time in which the divider
// and the root are busy, a tenth of the whole.
INLINE void finish_lean_adamw(Block &b, const Update &u, int64_t at) {
    const float *n = u.numbers;
    const int32_t first = block_exponent(b.first, kSignedOctaves), second = block_exponent(b.second, kUnsignedOctaves);
    const int32_t first_below = (first + 1) << 3, second_below = (second + 1) << 3;
    u.first_exponents[at / kBlock] = static_cast<uint8_t>(first);
    u.second_exponents[at / kBlock] = static_cast<uint8_t>(second);
    uint8_t *__restrict__ first_codes = static_cast<uint8_t *>(u.first) + at;
    uint8_t *__restrict__ second_codes = static_cast<uint8_t *>(u.second) + at;
    uint16_t *__restrict__ weight = static_cast<uint16_t *>(u.weight) + at;
    int8_t *__restrict__ residue = static_cast<int8_t *>(u.residue) + at;
    for (int64_t i = 0; i < kBlock; ++i) {
        const float master = adamw_master(b.master[i], b.first[i], b.second[i], n);
        first_codes[i] = encoded_signed(to_bits(b.first[i]), b.random[i], first_below);
        second_codes[i] = encoded_unsigned(to_bits(b.second[i]), b.random[i], second_below);
        split24(master, b.random[i], weight[i], residue[i]);
    }
}

INLINE void lion(Block &b, const float *n) {
    const float grad_scale = n[0], beta1 = n[1], one_minus_beta1 = n[2], beta2 = n[3], one_minus_beta2 = n[4];
    const float step_size = n[5], decay = n[6];
    for (int64_t i = 0; i < kBlock; ++i) {
        const float scaled = b.grad[i] * grad_scale;
        const float blend = beta1 * b.first[i] + one_minus_beta1 * scaled;
        const float step = blend > 0.0f ? step_size : blend < 0.0f ? -step_size : blend + 0.0f;  // a NaN stays one
        b.first[i] = without_denormals(beta2 * b.first[i] + one_minus_beta2 * scaled);
        b.master[i] = b.master[i] - (step + decay * b.master[i]);
    }
}

INLINE void sgd(Block &b, const float *n, bool has_momentum) {
    const float grad_scale = n[0], momentum = n[1], step_size = n[2], decay = n[3];
    for (int64_t i = 0; i < kBlock; ++i) b.grad[i] = b.grad[i] * grad_scale + decay * b.master[i];
    if (has_momentum)
        for (int64_t i = 0; i < kBlock; ++i) {
            b.first[i] = without_denormals(momentum * b.first[i] + b.grad[i]);
            b.grad[i] = b.first[i];
        }
    for (int64_t i = 0; i < kBlock; ++i) b.master[i] = b.master[i] - step_size * b.grad[i];
}

// Muon before and behind the device.
INLINE void momentum(Block &b, const float *n) {
    const float grad_scale = n[0], momentum = n[1], one_minus_momentum = n[2];
    for (int64_t i = 0; i < kBlock; ++i) {
        const float blend = one_minus_momentum * (b.grad[i] * grad_scale);
        b.first[i] = without_denormals(momentum * b.first[i] + blend);
        b.grad[i] = nearest_bf16(blend + momentum * b.first[i]);
    }
}

INLINE void descent(Block &b, const float *n) {
    const float step_size = n[0], decay = n[1];
    for (int64_t i = 0; i < kBlock; ++i) b.master[i] = b.master[i] - (step_size * b.grad[i] + decay * b.master[i]);
}

// ---- the pass

INLINE void load_moment(const void *values, const uint8_t *exponents, int64_t at, bool is_signed, float *__restrict__ moment) {
    if (!exponents) {
        std::memcpy(moment, static_cast<const float *>(values) + at, kBlock * sizeof(float));
    } else if (is_signed) {
        decode_signed(static_cast<const uint8_t *>(values) + at, exponents[at / kBlock], moment);
    } else {
        decode_unsigned(static_cast<const uint8_t *>(values) + at, exponents[at / kBlock], moment);
    }
}

INLINE void store_moment(void *values, uint8_t *exponents, int64_t at, bool is_signed, float *__restrict__ moment,
                         const uint32_t *__restrict__ random) {
    if (!exponents) {
        std::memcpy(static_cast<float *>(values) + at, moment, kBlock * sizeof(float));
    } else if (is_signed) {
        exponents[at / kBlock] = encode_signed(moment, random, static_cast<uint8_t *>(values) + at);
    } else {
        exponents[at / kBlock] = encode_unsigned(moment, random, static_cast<uint8_t *>(values) + at);
    }
}

// Asks for a block that will be needed a little later. TRAP: not inlined, gcc drops it as being without effect.
INLINE void ask(const void *plane, int64_t at, int64_t element_bytes) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(plane) + static_cast<uintptr_t>(at * element_bytes);
    for (int64_t offset = 0; offset < kBlock * element_bytes; offset += kLineBytes)
        __builtin_prefetch(reinterpret_cast<const void *>(start + static_cast<uintptr_t>(offset)), 1);
}

INLINE void ahead(const Update &u, int64_t at) {
    ask(u.grad, at, u.grad_is_fp32 ? 4 : 2);
    if (u.rule != kMomentum) ask(u.weight, at, u.master == kWhole ? 4 : 2);
    if (u.residue && u.rule != kMomentum) ask(u.residue, at, u.master == kSplit8 ? 1 : 2);
    if (u.first) ask(u.first, at, u.first_exponents ? 1 : 4);
    if (u.second) ask(u.second, at, u.second_exponents ? 1 : 4);
}

CLONES void update_range(const Update u, int64_t from, int64_t length) {
    Block block;
    const Lanes lanes;
    const MasterPlanes planes{u.weight, u.residue, u.master};
    const bool random = u.first_exponents || u.second_exponents || u.master == kSplit8 || u.master == kBf16;
    const bool lean = u.rule == kAdamW && u.master == kSplit8 && u.first_exponents && u.second_exponents;
    for (int64_t at = from; at < from + length; at += kBlock) {
        ahead(u, at + kAhead);
        if (random) draw(block.random, lanes, (u.start + at) / kBlock, u.key_low, u.key_high);
        if (u.rule != kMomentum) load_master(planes, at, kBlock, block.master);
        load_grad(u.grad, u.grad_is_fp32, at, kBlock, block.grad);
        if (u.first) load_moment(u.first, u.first_exponents, at, true, block.first);
        if (u.second) load_moment(u.second, u.second_exponents, at, false, block.second);
        if (lean) {
            adamw_moments(block, u.numbers);
            finish_lean_adamw(block, u, at);
            continue;
        }
        if (u.rule == kAdamW)
            adamw(block, u.numbers);
        else if (u.rule == kLion)
            lion(block, u.numbers);
        else if (u.rule == kSgd)
            sgd(block, u.numbers, u.first != nullptr);
        else if (u.rule == kMomentum)
            momentum(block, u.numbers);
        else
            descent(block, u.numbers);
        if (u.rule == kMomentum)
            store_grad(u, at, block.grad);
        else
            store_master(planes, at, kBlock, block.master, block.random);
        if (u.first) store_moment(u.first, u.first_exponents, at, true, block.first, block.random);
        if (u.second) store_moment(u.second, u.second_exponents, at, false, block.second, block.random);
    }
}

#ifdef LAYERFERRY_LEAN512
template <int32_t kMaster>
AVX512 void lean_range(const Update u, int64_t from, int64_t length) {
    LeanBlock block;
    const Lanes lanes;
    const PermutedLanes permuted(lanes);
    const LeanNumbers n(u.numbers);
    uint8_t *first = static_cast<uint8_t *>(u.first), *second = static_cast<uint8_t *>(u.second);
    uint8_t *residue = static_cast<uint8_t *>(u.residue);
    uint16_t *weight = static_cast<uint16_t *>(u.weight);
    const uint16_t *grad = static_cast<const uint16_t *>(u.grad);
    for (int64_t at = from; at < from + length; at += kBlock) {
        ahead(u, at + kAhead);
        uint8_t &first_exponent = u.first_exponents[at / kBlock], &second_exponent = u.second_exponents[at / kBlock];
        const __m512i first_base = _mm512_set1_epi16(static_cast<int16_t>((first_exponent + 1) << 7));
        const __m512i second_base = _mm512_set1_epi16(static_cast<int16_t>((second_exponent + 1) << 7));
        for (int64_t i = 0; i < kBlock; i += kGroup) {
            const Group g = upper_halves(load_halves(grad + at + i));
            const Group m = decoded_signed(load_bytes(first + at + i), first_base);
            const Group v = decoded_unsigned(load_bytes(second + at + i), second_base);
            move_half(g.low, m.low, v.low, n, block.first + i, block.second + i);
            move_half(g.high, m.high, v.high, n, block.first + i + kGroup / 2, block.second + i + kGroup / 2);
        }
        first_exponent = static_cast<uint8_t>(block_exponent(block.first, kSignedOctaves));
        second_exponent = static_cast<uint8_t>(block_exponent(block.second, kUnsignedOctaves));
        const __m512i first_below = _mm512_set1_epi16(static_cast<int16_t>((first_exponent + 1) << 3));
        const __m512i second_below = _mm512_set1_epi16(static_cast<int16_t>((second_exponent + 1) << 3));
        const Stir stir((u.start + at) / kBlock, u.key_low, u.key_high);
        const __m512i key = _mm512_set1_epi32(static_cast<int32_t>(stir.key));
        const __m512i factor = _mm512_set1_epi32(static_cast<int32_t>(stir.factor));
        for (int64_t i = 0; i < kBlock; i += kGroup) {
            const float *m = block.first + i, *v = block.second + i;
            const Group random{stirred(permuted.words + i, key, factor), stirred(permuted.words + i + kGroup / 2, key, factor)};
            const Group before = kMaster == kBf16 ? upper_halves(load_halves(weight + at + i))
                                                  : load_master24(weight + at + i, residue + at + i);
            const Group after{stepped_half(before.low, m, v, n),
                              stepped_half(before.high, m + kGroup / 2, v + kGroup / 2, n)};
            store_first(first + at + i, m, random, first_below);
            store_second(second + at + i, v, random, second_below);
            if (kMaster == kBf16)
                store_bf16(weight + at + i, after, random);
            else
                store_master24(weight + at + i, residue + at + i, after, random);
        }
    }
}
#endif

}  // namespace

extern "C" {

void layerferry_update(const Update *update, int threads) {
    void (*range)(const Update, int64_t, int64_t) = update_range;
#ifdef LAYERFERRY_LEAN512
    const bool lean = update->rule == kAdamW && update->first_exponents && update->second_exponents && !update->grad_is_fp32;
    if (lean && has_avx512() && update->master == kSplit8) range = lean_range<kSplit8>;
    if (lean && has_avx512() && update->master == kBf16) range = lean_range<kBf16>;
#endif
    parallel(update->count, threads, [=](int64_t start, int64_t length) { range(*update, start, length); });
}

}  // extern "C"
