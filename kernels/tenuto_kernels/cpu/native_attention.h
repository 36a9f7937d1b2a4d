// What native_attention.cpp offers the decoder: attention of some rows of a batch over the paged pool
// [B, L, 2, Hkv, block, D].
#pragma once

#include <cstdint>
#include <vector>

struct Shape {
    int64_t rows, q_heads, kv_heads, D, block_size, layers, layer, max_blocks, blocks;
    int64_t q_stride;  // elements from one token's queries to the next; results are always q_heads * D apart

    int64_t group() const { return q_heads / kv_heads; }
    int64_t head() const { return block_size * D; }
    // Offset of position 0 of `block`'s keys; its values follow kv_heads * head() later.
    int64_t keys(int64_t block, int64_t kv_head) const {
        return (block * layers + layer) * 2 * kv_heads * head() + kv_head * head();
    }
};

// Rows of a batch: tables [R, max_blocks], context [R]: positions visible at a row's end. Row r owns the queries
// [start[r], start[r + 1]), or, without `start`, query r. `chosen`: the rows that a call works on.
struct Rows {
    const int32_t *tables, *start, *context;
    std::vector<int32_t> chosen;

    Rows(int64_t count, const int32_t* tables, const int32_t* start, const int32_t* context)
        : tables(tables), start(start), context(context), chosen(count) {
        for (int64_t r = 0; r < count; r++) chosen[r] = (int32_t)r;
    }
    int64_t token(int64_t r) const { return start ? start[r] : r; }
    int64_t length(int64_t r) const { return start ? start[r + 1] - start[r] : 1; }
    // Whether every position a row may read lies in a block of the pool: a wrong table is an error, not a stray read.
    bool readable(const Shape& s) const;
};

// One query a row. A row without context yields zeros.
void attend_decode(const float* q, const void* pool, int pool_bf16, const Rows& rows, float scale, float* out,
                   const Shape& s, int threads);

// Ranges of queries, causal.
void attend_prefill(const float* q, const void* pool, int pool_bf16, const Rows& rows, float scale, float* out,
                    const Shape& s, int threads);
