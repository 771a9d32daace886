#include "monograph/serving/check.h"

#include <algorithm>

#include "monograph/base/error.h"
#include "monograph/serving/form.h"
#include "monograph/serving/gguf_tensors.h"

namespace monograph {

std::vector<ServingFinding> check_serving(const ServingCheck& check) {
  std::vector<ServingFinding> findings = broken_rules(check);
  const bool curable = std::all_of(findings.begin(), findings.end(),
                                   [](const ServingFinding& one) { return one.convertible; });
  if (!curable || (findings.empty() && check.server == Server::kPeft)) return findings;
  try {
    const ServingForm form(check);
    if (check.server == Server::kLlamaCpp) check_gguf_lora(form, *check.base);
  } catch (const files::IoError&) {
    throw;
  } catch (const Error& error) {
    findings.push_back({"form", "adapter_model", error.what(), false});
  }
  return findings;
}

}  // namespace monograph
