// KV blocks to eight bits a number and back (tenuto_kernels/lower.py has the definition). One block a call, on the calling
// thread: the workers that copy blocks call it while the model's threads compute.
#include "native.h"

namespace {

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// e4m3 has bias 7, fp32 has 127: a factor of 2^120 between numbers whose exponent fields are equal. The small numbers of
// either are then small numbers of the other, and rounding is that of an integer.
INLINE uint8_t to_e4m3(float x) {
    uint32_t bits = bits_of(std::fabs(x) * 0x1p-120f);
    uint32_t code = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20;
    code = code > 0x7E ? 0x7E : code;
    return (uint8_t)(code | (bits_of(x) >> 24 & 0x80));
}

INLINE float from_e4m3(uint8_t code) {
    float size = float_of((uint32_t)(code & 0x7F) << 20) * 0x1p120f;
    return float_of(bits_of(size) | (uint32_t)(code & 0x80) << 24);
}

INLINE float from_int8(uint8_t code) { return (float)(int8_t)code; }

// By name: as an addition of 2^23 it would be fused with the product before it, which then is not rounded where torch's is.
INLINE uint8_t to_int8(float x) { return (uint8_t)(int8_t)(int32_t)__builtin_rintf(x); }

INLINE void put(float* p, float x) { *p = x; }
INLINE void put(uint16_t* p, float x) {
    uint32_t bits = bits_of(x);
    *p = (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

template <class T, bool FP8>
void pack(const T* block, uint8_t* packed, int64_t groups, int64_t dim) {
    uint8_t* scales = packed + groups * dim;
    for (int64_t g = 0; g < groups; g++) {
        const T* in = block + g * dim;
        uint8_t* out = packed + g * dim;
        uint32_t largest = 0;  // of numbers without their sign, fp32 bits order as the numbers do
        for (int64_t d = 0; d < dim; d++) {
            uint32_t size = bits_of(to_float(in[d])) & 0x7FFFFFFF;
            largest = size > largest ? size : largest;
        }
        uint32_t scale = (bits_of(float_of(largest) / (FP8 ? 448.0f : 127.0f)) + 0xFFFF) & 0xFFFF0000;
        float inverse = scale ? 1.0f / float_of(scale) : 0.0f;
        for (int64_t d = 0; d < dim; d++) {
            float x = to_float(in[d]) * inverse;
            out[d] = FP8 ? to_e4m3(x) : to_int8(x);
        }
        uint16_t half = (uint16_t)(scale >> 16);
        std::memcpy(scales + 2 * g, &half, 2);
    }
}

template <class T, bool FP8>
void unpack(const uint8_t* packed, T* block, int64_t groups, int64_t dim) {
    const uint8_t* scales = packed + groups * dim;
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t* in = packed + g * dim;
        T* out = block + g * dim;
        uint16_t half;
        std::memcpy(&half, scales + 2 * g, 2);
        float scale = to_float(half);
        for (int64_t d = 0; d < dim; d++) put(out + d, (FP8 ? from_e4m3(in[d]) : from_int8(in[d])) * scale);
    }
}

}  // namespace

extern "C" void tn_lower_pack(const void* block, int bf16, uint8_t* packed, int64_t groups, int64_t dim, int fp8) {
    if (bf16 && fp8) pack<uint16_t, true>((const uint16_t*)block, packed, groups, dim);
    else if (bf16) pack<uint16_t, false>((const uint16_t*)block, packed, groups, dim);
    else if (fp8) pack<float, true>((const float*)block, packed, groups, dim);
    else pack<float, false>((const float*)block, packed, groups, dim);
}

extern "C" void tn_lower_unpack(const uint8_t* packed, void* block, int bf16, int64_t groups, int64_t dim, int fp8) {
    if (bf16 && fp8) unpack<uint16_t, true>(packed, (uint16_t*)block, groups, dim);
    else if (bf16) unpack<uint16_t, false>(packed, (uint16_t*)block, groups, dim);
    else if (fp8) unpack<float, true>(packed, (float*)block, groups, dim);
    else unpack<float, false>(packed, (float*)block, groups, dim);
}
