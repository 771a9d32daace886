#include "monograph/gguf_merge/along_inputs.h"

#include <string>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/gguf/encode_blocks.h"
#include "monograph/gguf_merge/round_blocks.h"
#include "monograph/merge/directions.h"
#include "monograph/text/utf8.h"

namespace monograph::gguf {
namespace {

class AlongInputs final : public RowEncoder {
 public:
  explicit AlongInputs(const InputMoments& inputs)
      : feedback_(feedback_along({inputs.d.size(), {}, {}}, &inputs)) {}

  void encode(TensorType type, std::span<const float> values, std::uint8_t* out) const override {
    gguf::encode(type, values.data(), values.size(), out);
    const std::vector<double> wanted(values.begin(), values.end());
    set_rounded_codes(type, wanted, wanted.size() / feedback_.cols, feedback_, out);
  }

 private:
  FeedbackRows feedback_;
};

const CalibratedInputs* inputs_of(const ExportedTensor& tensor, const Calibration& calibration) {
  const bool matrix = tensor.weight != nullptr && tensor.info.shape.size() >= 2;
  if (!matrix || info_of(tensor.info.type).block_elements == 1) return nullptr;
  return calibration.find(tensor.weight->name, tensor.info.shape.back());
}

}  // namespace

CalibratedTensors check_calibration(const ExportPlan& plan, const Calibration& calibration) {
  std::vector<std::string_view> names(plan.left_out.begin(), plan.left_out.end());
  // A tied head has inputs; its table of tokens is rounded for both uses.
  if (plan.config.tied) names.push_back("lm_head.weight");
  CalibratedTensors found;
  for (const ExportedTensor& tensor : plan.tensors) {
    if (tensor.weight == nullptr) continue;
    names.push_back(tensor.weight->name);
    if (tensor.info.shape.size() < 2 || info_of(tensor.info.type).block_elements == 1) continue;
    ++(inputs_of(tensor, calibration) != nullptr ? found.known : found.unknown);
  }
  if (const std::string other = calibration.module_beside(names); !other.empty()) {
    throw Error(calibration.file().string() + ": module " + text::in_quotes(other) +
                " is no weight of this model");
  }
  if (found.known == 0) {
    throw Error(calibration.file().string() + ": has the inputs of none of the " +
                std::to_string(found.unknown) + " matrices in blocks");
  }
  return found;
}

std::shared_ptr<const RowEncoder> along_inputs(const ExportedTensor& tensor,
                                               const Calibration& calibration) {
  const CalibratedInputs* inputs = inputs_of(tensor, calibration);
  return inputs == nullptr ? nullptr : std::make_shared<AlongInputs>(inputs->moments());
}

}  // namespace monograph::gguf
