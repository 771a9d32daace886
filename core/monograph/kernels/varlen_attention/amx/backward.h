// The backward on matrix units, bf16: the passes of backward_pass.h over the blocks of a document,
// and where their sums are written. Included by amx.cpp only.
#pragma once

#include "monograph/kernels/varlen_attention/amx/backward_pass.h"

namespace monograph {
namespace {

// Blocks of keys that stay in L2 with their sums (0.9 MB at a head of 128) while the queries pass
// by. One at a time read the packed queries from L3 more often: 1.1x slower at 4096 tokens.
constexpr std::int64_t kResidentBlocks = 2;

template <class T>
[[gnu::always_inline]] inline void clear(T* p, std::int64_t count) {
  __builtin_memset(p, 0, static_cast<std::size_t>(count) * sizeof(T));
}

// Where the strip `s` of a gradient goes.
struct Target {
  Bf16* data;
  std::ptrdiff_t stride;
  std::int64_t tokens, size;
};

[[gnu::always_inline]] inline Target target_of(const MutableHeadsView& view, std::int64_t begin,
                                               std::int64_t count, std::int64_t s, std::size_t head,
                                               std::size_t size) {
  Bf16* const data = static_cast<Bf16*>(view.data) + (begin + s * kStrip) * view.token_stride +
                     static_cast<std::ptrdiff_t>(head) * view.head_stride;
  return {data, view.token_stride, count - s * kStrip, static_cast<std::int64_t>(size)};
}

// A strip of dK or dV: [width / 32][2 key tiles x 2].
void write_keys(const float* sum, float factor, const Target& to) {
  const std::int64_t width = round_up_32(static_cast<std::size_t>(to.size));
  const __m512 f = _mm512_set1_ps(factor);
  for (std::int64_t r = 0; r < kStrip && r < to.tokens; ++r)
    for (std::int64_t c = 0; c < width; c += 32) {
      const float* const at = sum + c / 32 * kSquareF32 + r / 16 * 2 * kTileF32 + r % 16 * 16;
      const __m512i pair = to_bf16_pair(_mm512_mul_ps(_mm512_load_ps(at), f),
                                        _mm512_mul_ps(_mm512_load_ps(at + kTileF32), f));
      if (r + 16 < to.tokens) __builtin_prefetch(to.data + (r + 16) * to.stride + c, 1);
      _mm512_mask_storeu_epi16(to.data + r * to.stride + c, first_lanes(to.size - c), pair);
    }
}

// A strip of dQ': [key_width / 32][2 element tiles x 2 query tiles], queries in unpack order.
void write_queries(const float* sum, float factor, const Target& to) {
  const std::int64_t width = round_up_32(static_cast<std::size_t>(to.size));
  const __m512 f = _mm512_set1_ps(factor);
  for (std::int64_t c = 0; c < width; c += 32)
    for (std::int64_t h = 0; h < 2; ++h) {
      __m512i low[16], high[16];
      const float* const at = sum + (c / 16 * 2 + h) * kTileF32;
      transpose_16x16(reinterpret_cast<const std::uint32_t*>(at), 16, low);
      transpose_16x16(reinterpret_cast<const std::uint32_t*>(at + 2 * kTileF32), 16, high);
      for (std::int64_t column = 0; column < 16; ++column) {
        const std::int64_t r = column / 4 * 8 + h * 4 + column % 4;
        if (r >= to.tokens) continue;
        if (r + 32 < to.tokens) __builtin_prefetch(to.data + (r + 32) * to.stride + c, 1);
        const __m512i pair = to_bf16_pair(_mm512_mul_ps(_mm512_castsi512_ps(low[column]), f),
                                          _mm512_mul_ps(_mm512_castsi512_ps(high[column]), f));
        _mm512_mask_storeu_epi16(to.data + r * to.stride + c, first_lanes(to.size - c), pair);
      }
    }
}

void write_key_block(const BackwardUnit& unit, std::int64_t block, const Sums& sums) {
  const AttentionProblem& p = unit.job.problem;
  const Document& d = unit.document;
  const std::int64_t kw = round_up_32(p.key_size), vw = round_up_32(p.value_size);
  for (std::int64_t t = 0; t < kPieces; ++t) {
    const std::int64_t s = block * kPieces + t;
    if (s >= strips(d.keys)) return;
    if (!sums.keys_met[t]) {
      clear(sums.dk + t * kStrip * kw, kStrip * kw);
      clear(sums.dv + t * kStrip * vw, kStrip * vw);
    }
    write_keys(sums.dk + t * kStrip * kw, p.scale,
               target_of(unit.job.dk, d.key_begin, d.keys, s, unit.kv_head, p.key_size));
    write_keys(sums.dv + t * kStrip * vw, 1.f,
               target_of(unit.job.dv, d.key_begin, d.keys, s, unit.kv_head, p.value_size));
  }
}

void write_query_block(const BackwardUnit& unit, std::size_t head, std::int64_t block,
                       const Sums& sums) {
  const AttentionProblem& p = unit.job.problem;
  const Document& d = unit.document;
  const std::int64_t kw = round_up_32(p.key_size);
  for (std::int64_t t = 0; t < kPieces; ++t) {
    const std::int64_t s = block * kPieces + t;
    if (s >= strips(d.queries)) return;
    if (!sums.queries_met[t]) clear(sums.dq + t * kStrip * kw, kStrip * kw);
    write_queries(sums.dq + t * kStrip * kw, p.scale,
                  target_of(unit.job.dq, d.query_begin, d.queries, s, head, p.key_size));
  }
}

[[gnu::always_inline]] inline BlockPass block_pass(const BackwardUnit& unit, std::byte* memory) {
  const AttentionProblem& p = unit.job.problem;
  BumpAllocator shared{unit.packed}, own{memory};
  return {p, unit.document, visibility(p, unit.document), backward_packed(p, unit.document, shared),
          backward_scratch(p, own)};
}

[[gnu::always_inline]] inline std::int64_t blocks(std::int64_t tokens) {
  return (tokens + kBackwardBlock - 1) / kBackwardBlock;
}

// The sums of a whole document.
struct DocumentSums {
  float *dk, *dv, *dq;
  bool *keys_met, *queries_met;
  std::int64_t key_block, value_block;  // elements

  [[gnu::always_inline]] Sums of(std::int64_t k, std::int64_t b) const {
    return {dk + k * key_block, dv + k * value_block, dq + b * key_block, keys_met + k * kPieces,
            queries_met + b * kPieces};
  }
};

[[gnu::always_inline]] inline DocumentSums document_sums(const AttentionProblem& p,
                                                         const Document& d,
                                                         BumpAllocator& allocator) {
  DocumentSums sums;
  sums.key_block = round_up_32(p.key_size) * kBackwardBlock;
  sums.value_block = round_up_32(p.value_size) * kBackwardBlock;
  sums.dk = allocator.take<float>(blocks(d.keys) * sums.key_block);
  sums.dv = allocator.take<float>(blocks(d.keys) * sums.value_block);
  sums.dq = allocator.take<float>(blocks(d.queries) * sums.key_block);
  sums.keys_met = allocator.take<bool>(blocks(d.keys) * kPieces);
  sums.queries_met = allocator.take<bool>(blocks(d.queries) * kPieces);
  return sums;
}

std::size_t backward_sums_bytes(const AttentionProblem& p, const Document& d) {
  BumpAllocator allocator{nullptr};
  document_sums(p, d, allocator);
  return allocator.bytes();
}

// The whole unit, one head of the group after another; sums of the document stay in `memory`.
void backward_differentiate(const BackwardUnit& unit, std::byte* scratch, std::byte* memory,
                            float* dsinks) {
  const Document& d = unit.document;
  const BlockPass pass = block_pass(unit, scratch);
  BumpAllocator allocator{memory};
  const DocumentSums sums = document_sums(unit.job.problem, d, allocator);
  const std::int64_t key_blocks = blocks(d.keys), query_blocks = blocks(d.queries);
  clear(sums.keys_met, key_blocks * kPieces);
  for (std::int64_t k = 0; k < key_blocks; ++k) backward_pack_keys(unit, k);
  simd::Amx::configure();
  for (std::size_t g = 0; g < unit.group(); ++g) {
    const std::size_t head = unit.kv_head * unit.group() + g;
    clear(sums.queries_met, query_blocks * kPieces);
    for (std::int64_t b = 0; b < query_blocks; ++b) backward_pack_queries(unit, head, 0, b);
    if (dsinks != nullptr) dsinks[head] = backward_sink_gradient(unit, head, 0);
    const QueryPacked q = slot_of(pass.packed, d, 0);
    for (std::int64_t first = 0; first < key_blocks; first += kResidentBlocks)
      for (std::int64_t b = 0; b < query_blocks; ++b)
        for (std::int64_t k = first; k < first + kResidentBlocks && k < key_blocks; ++k)
          pass.run(q, k, b, sums.of(k, b));
    for (std::int64_t b = 0; b < query_blocks; ++b) write_query_block(unit, head, b, sums.of(0, b));
  }
  simd::Amx::release();
  for (std::int64_t k = 0; k < key_blocks; ++k) write_key_block(unit, k, sums.of(k, 0));
}

void backward_key_gradients(const BackwardUnit& unit, std::int64_t block, std::byte* memory) {
  const BlockPass pass = block_pass(unit, memory);
  bool met[kPieces] = {};
  const Sums sums{pass.scratch.dk, pass.scratch.dv, nullptr, met, nullptr};
  simd::Amx::configure();
  for (std::size_t g = 0; g < unit.group(); ++g) {
    const QueryPacked q = slot_of(pass.packed, unit.document, g);
    for (std::int64_t b = 0; b < blocks(unit.document.queries); ++b) pass.run(q, block, b, sums);
  }
  simd::Amx::release();
  write_key_block(unit, block, sums);
}

void backward_query_gradients(const BackwardUnit& unit, std::size_t g, std::int64_t block,
                              std::byte* memory) {
  const BlockPass pass = block_pass(unit, memory);
  bool met[kPieces] = {};
  const Sums sums{nullptr, nullptr, pass.scratch.dq, nullptr, met};
  simd::Amx::configure();
  const QueryPacked q = slot_of(pass.packed, unit.document, g);
  for (std::int64_t k = 0; k < blocks(unit.document.keys); ++k) pass.run(q, k, block, sums);
  simd::Amx::release();
  write_query_block(unit, unit.kv_head * unit.group() + g, block, sums);
}

}  // namespace
}  // namespace monograph
