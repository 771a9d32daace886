// The form of an adapter that a server applies as PEFT applies the original: one rank everywhere
// (zeros behind the smaller ones), the scale inside B, lora_alpha = r, no pattern, no rsLoRA, names
// of modules as the base stores them, one module an expert. For PEFT itself experts stay stacked.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "monograph/adapter/factors.h"
#include "monograph/safetensors/plan.h"
#include "monograph/safetensors/writer.h"
#include "monograph/serving/rules.h"

namespace monograph {

// A pair of the output.
struct ServedPair {
  std::string module;
  bool embedding = false;
  std::uint64_t outputs = 0, inputs = 0;
  const PlacedFactors* source = nullptr;  // null: zeros, for a server that wants LoRA here
  double scale = 1;                       // that is folded into B
  // Of experts: which one, and the rows of its matrix; a stack keeps all of them.
  std::uint64_t expert = 0, first_row = 0, row_step = 1, stacked = 0;
  DType a_type = DType::kFloat32, b_type = DType::kFloat32;

  std::string a_name() const;
  std::string b_name() const;
};

class ServingForm {
 public:
  // Throws Error naming the tensor if broken_rules finds something that no form of the adapter
  // cures, or the adapter holds anything but low-rank factors. What `check` points to must outlive
  // the form.
  explicit ServingForm(const ServingCheck& check);
  ServingForm(const ServingForm&) = delete;
  ServingForm& operator=(const ServingForm&) = delete;

  std::uint64_t rank() const { return rank_; }
  const std::vector<ServedPair>& pairs() const { return pairs_; }  // sorted by module
  // Pairs whose B is stored in fp32, rounded once to nearest even: the scale is no power of two.
  // The B of all others is exact, and so is every A.
  std::size_t rounded() const { return rounded_; }
  std::size_t zeros() const { return zeros_; }
  const std::vector<std::string>& notes() const { return notes_; }
  std::vector<std::string> target_modules() const;

  // A as [rank, inputs] and B as [outputs, rank], padded and scaled; of a stack as PEFT lays it
  // out.
  std::vector<float> right(const ServedPair& pair) const;
  std::vector<float> left(const ServedPair& pair) const;

  std::vector<safetensors::TensorSpec> specs() const;
  void write(safetensors::Writer& writer) const;
  // adapter_config.json: what says nothing about the weights is kept.
  json::Value config() const;

 private:
  void refuse(const std::vector<ServingFinding>& findings) const;
  void refuse_other_tensors() const;
  void add_placed(const PlacedFactors& placed);
  void add_single_experts(const PlacedFactors& placed, double scale);
  void fill_groups();
  void choose_types(ServedPair& pair);
  [[noreturn]] void fail(const std::string& key, const std::string& what) const;

  const ServingCheck check_;
  AdapterConfig config_;
  AdapterTensors tensors_;
  Placement placement_;
  std::uint64_t rank_ = 0;
  std::vector<ServedPair> pairs_;
  std::set<std::string> target_parameters_;
  std::vector<std::string> notes_;
  std::size_t rounded_ = 0, zeros_ = 0;
};

}  // namespace monograph
