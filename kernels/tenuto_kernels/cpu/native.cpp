// The small C ABI behind native.py: linear layers, norms, activation, rotary embedding with KV write.
// Attention is in native_attention.cpp, a whole decoder in native_decoder.cpp. No state: every buffer belongs to the caller.
//
// Conventions: `*_bf16` flags say which of fp32 / bf16 a buffer holds, `w_kind` what a weight is; `threads` is the caller's thread count.

#include "native_ops.h"

extern "C" {

int tn_panel_width() { return NR; }

// Bytes of a panel of K inputs whose weights are of `kind` (with_weights).
int64_t tn_panel_bytes(int64_t kind, int64_t K) {
    int64_t bytes = 0;
    with_weights(nullptr, kind, [&](auto w) { bytes = (const char*)w.panel(1, K).data - (const char*)w.data; });
    return bytes;
}

void tn_linear(const void* x, int x_bf16, const void* w, int w_kind, const float* bias, void* out, int64_t M, int64_t O,
               int64_t K, int threads) {
    with_weights(w, w_kind, [&](auto weights) {
        if (x_bf16)
            linear((const uint16_t*)x, weights, bias, (uint16_t*)out, M, O, K, false, threads);
        else
            linear((const float*)x, weights, bias, (float*)out, M, O, K, false, threads);
    });
}

void tn_rms_norm(const void* x, int bf16, const float* weight, void* out, int64_t rows, int64_t H, float eps,
                 int threads) {
    if (bf16)
        rms_norm((const uint16_t*)x, weight, (uint16_t*)out, rows, H, eps, threads);
    else
        rms_norm((const float*)x, weight, (float*)out, rows, H, eps, threads);
}

void tn_silu_mul(const void* gate_up, int bf16, void* out, int64_t rows, int64_t F, int threads) {
    if (bf16)
        silu_mul((const uint16_t*)gate_up, (uint16_t*)out, rows, F, threads);
    else
        silu_mul((const float*)gate_up, (float*)out, rows, F, threads);
}

// `shape` is a RopeStore, field by field. Returns 0, or 1 where a slot or the layer does not lie in the pool.
int tn_rope_store(void* q, void* k, const void* v, int bf16, const float* cosine, const float* sine, void* pool,
                   int pool_bf16, const int64_t* slots, const int64_t* shape, int threads) {
    RopeStore s;
    std::memcpy(&s, shape, sizeof s);
    if (s.layer < 0 || s.layer >= s.layers) return 1;
    for (int64_t t = 0; t < s.tokens; t++)
        if (slots[t] < 0 || slots[t] >= s.blocks * s.block_size) return 1;
    if (bf16 && pool_bf16)
        rope_store((uint16_t*)q, (uint16_t*)k, (const uint16_t*)v, cosine, sine, (uint16_t*)pool, slots, s, threads);
    else if (bf16)
        rope_store((uint16_t*)q, (uint16_t*)k, (const uint16_t*)v, cosine, sine, (float*)pool, slots, s, threads);
    else if (pool_bf16)
        rope_store((float*)q, (float*)k, (const float*)v, cosine, sine, (uint16_t*)pool, slots, s, threads);
    else
        rope_store((float*)q, (float*)k, (const float*)v, cosine, sine, (float*)pool, slots, s, threads);
    return 0;
}
}
