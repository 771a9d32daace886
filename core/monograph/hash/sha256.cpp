#include "monograph/hash/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace monograph {
namespace {

std::uint32_t big_endian(const std::uint8_t* at) {
  return std::uint32_t{at[0]} << 24 | std::uint32_t{at[1]} << 16 | std::uint32_t{at[2]} << 8 |
         std::uint32_t{at[3]};
}

// One block.
void take_block(Sha256State& state, const std::uint8_t* bytes) {
  std::array<std::uint32_t, 64> w;
  for (std::size_t i = 0; i < 16; ++i) w[i] = big_endian(bytes + 4 * i);
  for (std::size_t i = 16; i < 64; ++i) {
    const std::uint32_t a = w[i - 15], b = w[i - 2];
    const std::uint32_t small = std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3);
    const std::uint32_t large = std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10);
    w[i] = w[i - 16] + small + w[i - 7] + large;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (std::size_t i = 0; i < 64; ++i) {
    const std::uint32_t from_e = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const std::uint32_t choice = (e & f) ^ (~e & g);
    const std::uint32_t t1 = h + from_e + choice + kSha256Round[i] + w[i];
    const std::uint32_t from_a = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const std::uint32_t t2 = from_a + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const std::array<std::uint32_t, 8> sum = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < 8; ++i) state[i] += sum[i];
}

}  // namespace

void sha256_blocks_scalar(Sha256State& state, const std::uint8_t* bytes, std::size_t blocks) {
  for (; blocks != 0; --blocks, bytes += kSha256Block) take_block(state, bytes);
}

void Sha256::add(std::span<const std::uint8_t> bytes) {
  total_bytes_ += bytes.size();
  if (rest_bytes_ != 0) {
    const std::size_t taken = std::min(bytes.size(), rest_.size() - rest_bytes_);
    std::memcpy(rest_.data() + rest_bytes_, bytes.data(), taken);
    rest_bytes_ += taken;
    bytes = bytes.subspan(taken);
    if (rest_bytes_ < rest_.size()) return;
    sha256_blocks()(state_, rest_.data(), 1);
    rest_bytes_ = 0;
  }
  const std::size_t blocks = bytes.size() / kSha256Block;
  sha256_blocks()(state_, bytes.data(), blocks);
  bytes = bytes.subspan(blocks * kSha256Block);
  if (!bytes.empty()) std::memcpy(rest_.data(), bytes.data(), bytes.size());
  rest_bytes_ = bytes.size();
}

std::string Sha256::hex() {
  const std::uint64_t bits = total_bytes_ * 8;
  const std::array<std::uint8_t, 64> padding = {0x80};
  const std::size_t pad = (rest_bytes_ < 56 ? 56 : 120) - rest_bytes_;
  add(std::span(padding).first(std::min<std::size_t>(pad, 64)));
  if (pad > 64) add(std::span<const std::uint8_t>(padding).subspan(1, pad - 64));
  std::array<std::uint8_t, 8> length{};
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<std::uint8_t>(bits >> (56 - 8 * i));
  add(length);
  std::string text;
  for (const std::uint32_t word : state_) {
    for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[word >> shift & 15];
  }
  return text;
}

}  // namespace monograph
