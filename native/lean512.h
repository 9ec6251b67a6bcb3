// AdamW with 8-bit moments, a 24-bit or a bf16 master, for AVX-512: `update_range` of `formats.cpp` for these two, bit for bit.
//
// What for: of all lean formats these are used most, and moving half of AdamW's bytes they are bound by arithmetic: by two
// vector ports, since the compiler widens every code and residue to 32 bits before it touches them, and permutes words across
// lanes to narrow them again. Here 32 elements go together: bytes and halves are worked on in 16-bit lanes, twice as many at a
// time, and are interleaved with each other into 32 bits and packed again inside 128-bit lanes, which is one cheap instruction
// each way. Elements are out of order in between; nothing minds but the table of random words, which is permuted alike.
//
// Leaves out: gradients in fp32, which would need the order. Checked by `tests/optim/test_formats.py`, as every clone is.

#pragma once

#include "masters.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define LAYERFERRY_LEAN512

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define AVX512_INLINE AVX512 __attribute__((always_inline)) inline

namespace {

// One library serves every processor; the tests build one level at a time.
inline bool has_avx512() {
#ifdef LAYERFERRY_NO_CLONES
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
    return true;
#else
    return false;
#endif
#else
    static const bool known = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return known;
#endif
}

constexpr int64_t kGroup = 32;  // elements of one vector of halves

// 32 elements of 32 bits: the first and the last four of every eight.
struct Group {
    __m512i low, high;
};

struct alignas(64) LeanBlock {
    float first[kBlock], second[kBlock];
};

struct alignas(64) PermutedLanes {
    uint32_t words[kBlock];
    explicit PermutedLanes(const Lanes &lanes) {
        for (int64_t i = 0; i < kBlock; ++i) {
            const int64_t group = i / kGroup, eight = i % kGroup / 8, place = i % 8;
            words[group * kGroup + (place < 4 ? 0 : kGroup / 2) + 4 * eight + place % 4] = lanes.words[i];
        }
    }
};

AVX512_INLINE __m512 as_floats(__m512i bits) { return _mm512_castsi512_ps(bits); }
AVX512_INLINE __m512i as_bits(__m512 values) { return _mm512_castps_si512(values); }

AVX512_INLINE __m512i load_halves(const void *from) { return _mm512_loadu_si512(from); }

AVX512_INLINE __m512i load_bytes(const uint8_t *from) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}

AVX512_INLINE void store_bytes(uint8_t *to, __m512i halves) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm512_cvtepi16_epi8(halves));
}

AVX512_INLINE Group interleave(__m512i lower, __m512i upper) {
    return {_mm512_unpacklo_epi16(lower, upper), _mm512_unpackhi_epi16(lower, upper)};
}

AVX512_INLINE Group upper_halves(__m512i upper) { return interleave(_mm512_setzero_si512(), upper); }

// The inverse for numbers below 2**16.
AVX512_INLINE __m512i packed(__m512i low, __m512i high) { return _mm512_packus_epi32(low, high); }

AVX512_INLINE __m512i packed_upper(const Group &g) {
    return packed(_mm512_srli_epi32(g.low, 16), _mm512_srli_epi32(g.high, 16));
}

AVX512_INLINE Group decoded_signed(__m512i codes, __m512i base) {
    const __m512i magnitude = _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x7f)), 4);
    const __m512i value = _mm512_maskz_add_epi16(_mm512_test_epi16_mask(magnitude, magnitude), magnitude, base);
    const __m512i upper = _mm512_slli_epi16(codes, 8);
    return upper_halves(_mm512_ternarylogic_epi32(upper, _mm512_set1_epi16(static_cast<int16_t>(0x8000)), value, 0xea));
}

AVX512_INLINE Group decoded_unsigned(__m512i codes, __m512i base) {
    return upper_halves(_mm512_maskz_add_epi16(_mm512_test_epi16_mask(codes, codes), _mm512_slli_epi16(codes, 4), base));
}

// Zero where the exponent is: what `without_denormals` and its like make of a number.
AVX512_INLINE __m512 normal_or_zero(__m512 value) {
    return _mm512_maskz_mov_ps(_mm512_test_epi32_mask(as_bits(value), _mm512_set1_epi32(0x7f800000)), value);
}

struct LeanNumbers {
    __m512 grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, rsqrt_bias_correction2, eps, step_size, decay;
    AVX512_INLINE explicit LeanNumbers(const float *n)
        : grad_scale(_mm512_set1_ps(n[0])), beta1(_mm512_set1_ps(n[1])), one_minus_beta1(_mm512_set1_ps(n[2])),
          beta2(_mm512_set1_ps(n[3])), one_minus_beta2(_mm512_set1_ps(n[4])), rsqrt_bias_correction2(_mm512_set1_ps(n[5])),
          eps(_mm512_set1_ps(n[6])), step_size(_mm512_set1_ps(n[7])), decay(_mm512_set1_ps(n[8])) {}
};

AVX512_INLINE void move_half(__m512i grad, __m512i first, __m512i second, const LeanNumbers &n, float *m, float *v) {
    const __m512 scaled = _mm512_mul_ps(as_floats(grad), n.grad_scale);
    const __m512 blend = _mm512_add_ps(_mm512_mul_ps(n.beta1, as_floats(first)), _mm512_mul_ps(n.one_minus_beta1, scaled));
    const __m512 square = _mm512_mul_ps(_mm512_mul_ps(n.one_minus_beta2, scaled), scaled);
    _mm512_store_ps(m, normal_or_zero(blend));
    _mm512_store_ps(v, normal_or_zero(_mm512_add_ps(_mm512_mul_ps(n.beta2, as_floats(second)), square)));
}

AVX512_INLINE __m512i stepped_half(__m512i bits, const float *m, const float *v, const LeanNumbers &n) {
    const __m512 master = as_floats(bits);
    const __m512 root = _mm512_mul_ps(_mm512_sqrt_ps(_mm512_load_ps(v)), n.rsqrt_bias_correction2);
    const __m512 ratio = _mm512_div_ps(_mm512_load_ps(m), _mm512_add_ps(root, n.eps));
    const __m512 step = _mm512_add_ps(_mm512_mul_ps(n.step_size, ratio), _mm512_mul_ps(n.decay, master));
    const __m512 moved = _mm512_sub_ps(master, step);
    const __mmask16 nan = _mm512_cmp_ps_mask(moved, moved, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(as_bits(moved), nan, _mm512_set1_epi32(static_cast<int32_t>(kQuietNan)));
}

AVX512_INLINE __m512i stirred(const uint32_t *words, __m512i key, __m512i factor) {
    const __m512i word = _mm512_mullo_epi32(_mm512_xor_si512(_mm512_load_si512(words), key), factor);
    return _mm512_xor_si512(word, _mm512_srli_epi32(word, 16));
}

AVX512_INLINE void store_first(uint8_t *codes, const float *m, const Group &random, __m512i below) {
    const Group rounded{_mm512_add_epi32(_mm512_load_si512(m), _mm512_srli_epi32(random.low, 12)),
                        _mm512_add_epi32(_mm512_load_si512(m + kGroup / 2), _mm512_srli_epi32(random.high, 12))};
    const __m512i upper = packed_upper(rounded);
    const __m512i magnitude = _mm512_srli_epi16(_mm512_and_si512(upper, _mm512_set1_epi16(0x7fff)), 4);
    const __m512i code = _mm512_subs_epu16(magnitude, below);
    store_bytes(codes, _mm512_ternarylogic_epi32(_mm512_srli_epi16(upper, 8), _mm512_set1_epi16(0x80), code, 0xea));
}

// A number that is not zero has an exponent, so its upper half is at least 0x80; of zero, random bits reach 0xf.
AVX512_INLINE void store_second(uint8_t *codes, const float *v, const Group &random, __m512i below) {
    const __m512i dropped = _mm512_set1_epi32(0xfffff);
    const Group rounded{_mm512_add_epi32(_mm512_load_si512(v), _mm512_and_si512(random.low, dropped)),
                        _mm512_add_epi32(_mm512_load_si512(v + kGroup / 2), _mm512_and_si512(random.high, dropped))};
    const __m512i upper = packed_upper(rounded);
    const __m512i code = _mm512_subs_epu16(_mm512_srli_epi16(upper, 4), below);
    const __mmask32 is_number = _mm512_cmpge_epu16_mask(upper, _mm512_set1_epi16(0x80));
    store_bytes(codes, _mm512_maskz_max_epu16(is_number, code, _mm512_set1_epi16(1)));
}

AVX512_INLINE void store_bf16(uint16_t *weight, const Group &bits, const Group &random) {
    const __m512i dropped = _mm512_set1_epi32(0xffff);
    const Group rounded{_mm512_add_epi32(bits.low, _mm512_and_si512(random.low, dropped)),
                        _mm512_add_epi32(bits.high, _mm512_and_si512(random.high, dropped))};
    _mm512_storeu_si512(weight, packed_upper(rounded));
}

AVX512_INLINE void store_master24(uint16_t *weight, uint8_t *residue, const Group &bits, const Group &random) {
    const __m512i byte = _mm512_set1_epi32(0xff), half = _mm512_set1_epi32(0x8000), lower = _mm512_set1_epi32(0xffff);
    const Group rounded{_mm512_add_epi32(bits.low, _mm512_and_si512(_mm512_srli_epi32(random.low, 4), byte)),
                        _mm512_add_epi32(bits.high, _mm512_and_si512(_mm512_srli_epi32(random.high, 4), byte))};
    const Group nearest{_mm512_add_epi32(rounded.low, half), _mm512_add_epi32(rounded.high, half)};
    _mm512_storeu_si512(weight, packed_upper(nearest));
    const __m512i rest = packed(_mm512_and_si512(rounded.low, lower), _mm512_and_si512(rounded.high, lower));
    store_bytes(residue, _mm512_srli_epi16(rest, 8));
}

// The weight is the upper half, less one where the residue is negative; the residue's byte is the upper one of the lower half.
AVX512_INLINE Group load_master24(const uint16_t *weight, const uint8_t *residue) {
    const __m512i rest = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(residue)));
    return interleave(_mm512_slli_epi16(rest, 8), _mm512_add_epi16(load_halves(weight), _mm512_srai_epi16(rest, 15)));
}

}  // namespace
#endif
