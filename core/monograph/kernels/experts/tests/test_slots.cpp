// Lists of slots, computed by the owners of their experts, against one call: the same bits.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "monograph/kernels/experts/tests/layer_in_double.h"

namespace monograph {
namespace {

struct Results {
  Bytes y, dx, dweights;
  std::vector<Bytes> of_experts;  // dbias1, dbias2, da1, db1, da2, db2, as one process has them
};

// The i-th gradient of what experts have, by the projection and the place where its bytes go.
struct Part {
  std::size_t size;  // elements
  bool b;            // lies as B: column j * E + e
  std::size_t rank, out;
  void* ExpertsGradients::*place;
};

std::vector<Part> parts_of(const ExpertsProblem& p) {
  const auto& [up, down] =
      std::pair<const ExpertsProjection&, const ExpertsProjection&>(p.up, p.down);
  const auto some = [](const void* pointer, std::size_t size) { return pointer ? size : 0; };
  const std::size_t e = p.experts;
  return {{some(up.bias, e * up.out), false, 0, 0, &ExpertsGradients::dbias1},
          {some(down.bias, e * down.out), false, 0, 0, &ExpertsGradients::dbias2},
          {e * up.rank * up.in, false, 0, 0, &ExpertsGradients::da1},
          {e * up.rank * up.out, true, up.rank, up.out, &ExpertsGradients::db1},
          {e * down.rank * down.in, false, 0, 0, &ExpertsGradients::da2},
          {e * down.rank * down.out, true, down.rank, down.out, &ExpertsGradients::db2}};
}

Results in_one(const Layer& layer, const Bytes& dy) {
  const ExpertsProblem& p = layer.problem;
  const std::size_t element = size_bytes(p.dtype), side = size_bytes(layer.shape.side);
  Results r;
  r.y.assign(p.tokens * p.down.out * element, 0xab);
  r.dx = r.y;
  r.dweights.assign(layer.weights.size(), 0xab);
  experts(p, r.y.data(), nullptr, serial_for);
  ExpertsGradients g;
  g.dx = r.dx.data();
  g.dweights = r.dweights.data();
  for (const Part& part : parts_of(p))
    r.of_experts.emplace_back(part.size * side, std::uint8_t{0xab});
  for (std::size_t i = 0; i < r.of_experts.size(); ++i)
    if (!r.of_experts[i].empty()) g.*parts_of(p)[i].place = r.of_experts[i].data();
  experts_backward(p, {dy.data(), p.tokens, p.down.out, p.down.out}, nullptr, g, serial_for);
  return r;
}

// B [out, rank E] of the experts [first, first + count), or the other way round.
void copy_columns(const Part& part, std::size_t experts, std::size_t first, std::size_t count,
                  std::size_t side, Bytes& whole, Bytes& cut, bool back) {
  for (std::size_t row = 0; row < part.out * part.rank; ++row) {
    std::uint8_t* const all = whole.data() + (row * experts + first) * side;
    std::uint8_t* const own = cut.data() + row * count * side;
    std::memcpy(back ? all : own, back ? own : all, count * side);
  }
}

// One of `owners` computes the slots of its experts alone, and the rows go back to where the tokens
// are.
Results by_owners(const Layer& layer, const Bytes& dy, std::size_t owners) {
  const ExpertsProblem& whole = layer.problem;
  const std::size_t element = size_bytes(whole.dtype), side = size_bytes(layer.shape.side);
  const std::size_t hidden = whole.down.out, all = layer.ids.size();
  const std::vector<Part> parts = parts_of(whole);
  Results r;
  r.dweights.assign(layer.weights.size(), 0);
  for (const Part& part : parts) r.of_experts.emplace_back(part.size * side, std::uint8_t{0xab});
  Bytes d_rows, dx_rows;
  std::vector<std::int64_t> places(all, -1);
  std::size_t arrived = 0;
  for (std::size_t owner = 0; owner < owners; ++owner) {
    const std::size_t first = owner * whole.experts / owners;
    const std::size_t count = (owner + 1) * whole.experts / owners - first;
    std::vector<std::int64_t> ids, rows, slots;
    Bytes weights;
    for (std::size_t slot = 0; slot < all; ++slot) {
      const std::int64_t expert = layer.ids[slot] - static_cast<std::int64_t>(first);
      if (expert < 0 || expert >= static_cast<std::int64_t>(count)) continue;
      places[slot] = static_cast<std::int64_t>(arrived + ids.size());
      ids.push_back(expert);
      rows.push_back(static_cast<std::int64_t>(slot / whole.slots));
      slots.push_back(static_cast<std::int64_t>(slot));
      weights.insert(weights.end(),
                     layer.weights.begin() + static_cast<std::ptrdiff_t>(slot * side),
                     layer.weights.begin() + static_cast<std::ptrdiff_t>((slot + 1) * side));
    }
    ExpertsProblem p = whole;
    p.experts = count;
    p.tokens = ids.size();
    p.slots = 1;
    p.ids = ids.data();
    p.slot_rows = rows.data();
    p.weights = nullptr;
    std::vector<Bytes> own;
    for (const Part& part : parts) own.emplace_back(part.size / whole.experts * count * side);
    Bytes b1 = own[3], b2 = own[5];
    const auto cut = [&](ExpertsProjection& projection, const Stack& stack, const Part& part,
                         Bytes& b) {
      projection.weight.first =
          slice_rows(projection.weight.first, first * projection.out, count * projection.out);
      const auto offset = [&](const void*& pointer, std::size_t each) {
        if (pointer != nullptr)
          pointer = static_cast<const std::byte*>(pointer) + first * each * side;
      };
      offset(projection.bias, projection.out);
      offset(projection.a, projection.rank * projection.in);
      if (projection.b == nullptr) return;
      Bytes bytes = stack.b;
      copy_columns(part, whole.experts, first, count, side, bytes, b, false);
      projection.b = b.data();
    };
    cut(p.up, layer.up, parts[3], b1);
    cut(p.down, layer.down, parts[5], b2);
    Bytes d(ids.size() * hidden * element, 0xab), dx(d.size(), 0xab),
        dweights(weights.size(), 0xab);
    experts(p, d.data(), nullptr, serial_for);
    p.weights = weights.data();
    ExpertsGradients g;
    g.dx = dx.data();
    g.dweights = dweights.data();
    for (std::size_t i = 0; i < parts.size(); ++i)
      if (!own[i].empty()) g.*parts[i].place = own[i].data();
    experts_backward(p, {dy.data(), whole.tokens, hidden, hidden}, nullptr, g, serial_for);
    d_rows.insert(d_rows.end(), d.begin(), d.end());
    dx_rows.insert(dx_rows.end(), dx.begin(), dx.end());
    for (std::size_t i = 0; i < slots.size(); ++i)
      std::memcpy(r.dweights.data() + static_cast<std::size_t>(slots[i]) * side,
                  dweights.data() + i * side, side);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::size_t each = parts[i].size / whole.experts * side;
      if (parts[i].b)
        copy_columns(parts[i], whole.experts, first, count, side, r.of_experts[i], own[i], true);
      else if (each != 0)
        std::memcpy(r.of_experts[i].data() + first * each, own[i].data(), count * each);
    }
    arrived += ids.size();
  }
  SlotSums sums = {whole.dtype,        {d_rows.data(), arrived, hidden, hidden},
                   whole.tokens,       whole.slots,
                   places.data(),      whole.weights,
                   whole.weights_dtype};
  r.y.assign(whole.tokens * hidden * element, 0xab);
  combine_slots(sums, r.y.data(), serial_for);
  r.dx = r.y;
  sums.rows.data = dx_rows.data();
  sums.weights = nullptr;
  combine_slots(sums, r.dx.data(), serial_for);
  return r;
}

TEST(Slots, OwnersOfExpertsGiveTheBitsOfOneCall) {
  unsigned seed = 40;
  for (const char* format : {"plain", "nf4", "mxfp4", "fp8-block", "nvfp4"})
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32})
      for (const bool adapted : {false, true}) {
        LayerShape shape;
        shape.format = format;
        shape.dtype = dtype;
        shape.biases = shape.interleaved = adapted;
        if (adapted) shape.activation = ExpertsActivation::kClampedGlu;
        shape.rank1 = adapted ? 4 : 0;
        shape.rank2 = adapted ? 17 : 0;
        shape.side = seed % 2 == 0 ? dtype : DType::kFloat32;
        // Cut inside a group of 256 blocks, and for NF4 inside a block. The last expert, and with
        // five owners the last owner, gets nothing.
        shape.hidden = 96;
        shape.inner = 96;
        shape.slots = 3;
        if (std::string(format) == "nf4") shape.hidden = shape.inner = 34;
        SCOPED_TRACE(shape.name());
        Layer layer(shape, seed++);
        const Bytes dy = stored(dtype, layer.normal(shape.tokens * shape.hidden, 1.0));
        const Results want = in_one(layer, dy);
        for (const std::size_t owners : {1, 2, 3, 5}) {
          const Results got = by_owners(layer, dy, owners);
          EXPECT_EQ(got.y, want.y) << owners;
          EXPECT_EQ(got.dx, want.dx) << owners;
          EXPECT_EQ(got.dweights, want.dweights) << owners;
          EXPECT_EQ(got.of_experts, want.of_experts) << owners;
        }
      }
}

TEST(Slots, RowsThatAreNamedTwiceAndNone) {
  LayerShape shape;
  Layer layer(shape, 70);
  ExpertsProblem p = layer.problem;
  const std::int64_t ids[] = {1, 1, 3, 0}, rows[] = {7, 7, 0, 22};
  p.ids = ids;
  p.slot_rows = rows;
  p.tokens = 4;
  p.slots = 1;
  p.weights = nullptr;
  const std::size_t row = shape.hidden * size_bytes(shape.dtype);
  Bytes d(4 * row, 0xab);
  experts(p, d.data(), nullptr, serial_for);
  EXPECT_EQ(std::memcmp(d.data(), d.data() + row, row), 0);
  EXPECT_NE(std::memcmp(d.data(), d.data() + 2 * row, row), 0);
  p.tokens = 0;
  experts(p, d.data(), nullptr, serial_for);
  Bytes nothing(layer.x.size(), 0xab);
  const std::vector<std::int64_t> places(shape.tokens * 2, -1);
  combine_slots({shape.dtype,
                 {nullptr, 0, shape.hidden, shape.hidden},
                 shape.tokens,
                 2,
                 places.data(),
                 nullptr,
                 DType::kFloat32},
                nothing.data(), serial_for);
  EXPECT_EQ(nothing, Bytes(nothing.size(), 0));
}

}  // namespace
}  // namespace monograph
