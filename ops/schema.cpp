// The schema of every operator (but for those of bench/), apart from what implements it: cpu/
// registers kernels for CPU tensors, another backend registers its own beside them, and
// python/monograph/ops/ the fakes, the gradients and the portable implementations.
// docs/reference/operators.md says what the arguments mean.
//
// No defaults where there is a gradient: the dispatcher would drop arguments equal to them, and
// autograd formulas count arguments.
#include "stable.h"

namespace monograph::ops {

STABLE_TORCH_LIBRARY_FRAGMENT(monograph, m) {
  m.def(
      "adamw_update(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] exp_avg, "
      "Tensor(c!)[] exp_avg_sq, Tensor(d!) steps, Tensor learning_rate, float beta1, float beta2, "
      "float eps, float[] weight_decay, float max_norm) -> Tensor");
  m.def(
      "quantize(Tensor input, int format, int block, bool double_quant, bool saturate_nonfinite, "
      "int rule=0, int scale_bytes=0) -> Tensor[]");
  m.def(
      "split_quantize(Tensor input, SymInt[] splits, int format, int block, bool rowwise, "
      "bool columnwise, bool saturate_nonfinite, int rule) -> Tensor[]");
  m.def("dequantize(Tensor values, Tensor[] scales, SymInt[] layout, ScalarType dtype) -> Tensor");
  m.def("dequantize_out(Tensor values, Tensor[] scales, SymInt[] layout, Tensor(a!) out) -> ()");
  m.def(
      "linear(Tensor x, Tensor values, Tensor[] scales, SymInt[] layout, Tensor? bias, "
      "Tensor? u, Tensor? b, Tensor? a) -> Tensor");
  m.def(
      "linear_dx(Tensor dy, Tensor values, Tensor[] scales, SymInt[] layout, Tensor? du, "
      "Tensor? a) -> Tensor");
  m.def("gram(Tensor left, Tensor right, Tensor? sum, ScalarType dtype) -> Tensor");
  m.def(
      "linear_scaled(Tensor x, Tensor values, Tensor[] scales, SymInt[] layout, Tensor gain, "
      "Tensor u, Tensor b, Tensor a) -> Tensor");
  m.def(
      "linear_shared(Tensor x, Tensor[] values, Tensor[] scales, SymInt[] layouts, Tensor[] bias, "
      "Tensor[] u, Tensor[] b, Tensor[] a) -> Tensor[]");
  m.def(
      "linear_shared_dx(Tensor[] dy, Tensor[] values, Tensor[] scales, SymInt[] layouts, "
      "Tensor[] du, Tensor[] a) -> Tensor");
  m.def(
      "linear_many(Tensor x, Tensor values, Tensor[] scales, SymInt[] layout, Tensor starts, "
      "Tensor u, Tensor[] b, Tensor[] a, Tensor[] bias, Tensor[] gain) -> Tensor");
  m.def(
      "linear_many_dx(Tensor dy, Tensor values, Tensor[] scales, SymInt[] layout, Tensor starts, "
      "Tensor du, Tensor[] a) -> Tensor");
  m.def("low_rank_many(Tensor x, Tensor[] factors, Tensor starts, SymInt width) -> Tensor");
  m.def("low_rank_many_dx(Tensor du, Tensor[] factors, Tensor starts, SymInt width) -> Tensor");
  m.def(
      "gram_many(Tensor left, Tensor right, Tensor starts, SymInt[] left_cols, "
      "SymInt[] right_cols, ScalarType dtype) -> Tensor[]");
  m.def(
      "linear_cross_entropy(Tensor x, Tensor values, Tensor[] scales, SymInt[] layout, "
      "Tensor? bias, Tensor labels, float softcap, float scale, bool need_dx) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "linear_cross_entropy_dw(Tensor x, Tensor weight, Tensor? bias, Tensor labels, Tensor lse, "
      "Tensor g, float softcap, float scale) -> (Tensor, Tensor)");
  m.def(
      "linear_log_probs(Tensor x, Tensor values, Tensor[] scales, SymInt[] layout, Tensor? bias, "
      "Tensor labels, float softcap, float scale, bool need_dx) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "linear_entropy_dx(Tensor x, Tensor values, Tensor[] scales, SymInt[] layout, Tensor? bias, "
      "Tensor labels, Tensor lse, Tensor entropy, Tensor g, float softcap, float scale) -> Tensor");
  // In aten operations, in Python: rare, and nothing where the entropy is not used.
  m.def(
      "linear_entropy_dw(Tensor x, Tensor weight, Tensor? bias, Tensor labels, Tensor lse, "
      "Tensor entropy, Tensor g, float softcap, float scale) -> (Tensor, Tensor)");
  m.def(
      "experts(Tensor x, Tensor ids, Tensor weights, Tensor values1, Tensor[] scales1, "
      "SymInt[] layout1, Tensor? bias1, Tensor values2, Tensor[] scales2, SymInt[] layout2, "
      "Tensor? bias2, Tensor? a1, Tensor? b1, Tensor? a2, Tensor? b2, float lora_scale1, "
      "float lora_scale2, int activation, bool interleaved, float alpha, float limit, "
      "bool transposed, bool save) -> (Tensor, Tensor)");
  m.def(
      "experts_backward(Tensor dy, Tensor pre, Tensor x, Tensor ids, Tensor weights, "
      "Tensor values1, Tensor[] scales1, SymInt[] layout1, Tensor? bias1, Tensor values2, "
      "Tensor[] scales2, SymInt[] layout2, Tensor? bias2, Tensor? a1, Tensor? b1, Tensor? a2, "
      "Tensor? b2, float lora_scale1, float lora_scale2, int activation, bool interleaved, "
      "float alpha, float limit, bool transposed, bool[] need) -> (Tensor, Tensor, Tensor, "
      "Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "experts_dw(Tensor dy, Tensor pre, Tensor x, Tensor ids, Tensor weights, Tensor values1, "
      "Tensor[] scales1, SymInt[] layout1, Tensor? bias1, Tensor values2, Tensor[] scales2, "
      "SymInt[] layout2, Tensor? bias2, Tensor? a1, Tensor? b1, Tensor? a2, Tensor? b2, "
      "float lora_scale1, float lora_scale2, int activation, bool interleaved, float alpha, "
      "float limit, bool transposed) -> (Tensor, Tensor)");
  m.def(
      "experts_slots(Tensor x, Tensor rows, Tensor ids, Tensor values1, Tensor[] scales1, "
      "SymInt[] layout1, Tensor? bias1, Tensor values2, Tensor[] scales2, SymInt[] layout2, "
      "Tensor? bias2, Tensor? a1, Tensor? b1, Tensor? a2, Tensor? b2, float lora_scale1, "
      "float lora_scale2, int activation, bool interleaved, float alpha, float limit, "
      "bool transposed) -> Tensor");
  m.def(
      "experts_slots_backward(Tensor dy, Tensor x, Tensor rows, Tensor ids, Tensor weights, "
      "Tensor values1, Tensor[] scales1, SymInt[] layout1, Tensor? bias1, Tensor values2, "
      "Tensor[] scales2, SymInt[] layout2, Tensor? bias2, Tensor? a1, Tensor? b1, Tensor? a2, "
      "Tensor? b2, float lora_scale1, float lora_scale2, int activation, bool interleaved, "
      "float alpha, float limit, bool transposed, bool[] need) -> (Tensor, Tensor, Tensor, "
      "Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("combine_slots(Tensor rows, Tensor places, Tensor? weights) -> Tensor");
  m.def("choose_experts(Tensor logits, int slots, bool normalise) -> (Tensor, Tensor)");
  m.def(
      "choose_experts_backward(Tensor dweights, Tensor logits, Tensor ids, bool normalise) "
      "-> Tensor");
  m.def(
      "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, "
      "Tensor? key_lengths, Tensor? sinks, bool causal, SymInt window, float scale, float softcap) "
      "-> (Tensor, Tensor)");
  m.def(
      "varlen_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor lse, Tensor cu_q, Tensor cu_k, Tensor? key_lengths, Tensor? sinks, bool causal, "
      "SymInt window, float scale, float softcap) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "rms_norm(Tensor x, Tensor? weight, Tensor? residual, float eps, bool one_plus_weight, "
      "bool round_before_weight) -> (Tensor, Tensor)");
  m.def(
      "rms_norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor? weight, float eps, "
      "bool one_plus_weight, bool round_before_weight, bool need_dweight) -> (Tensor, Tensor)");
  m.def(
      "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor cu, Tensor? state, bool silu, "
      "bool keep_state) -> (Tensor y, Tensor final_state)");
  m.def(
      "causal_conv1d_backward(Tensor dy, Tensor? dfinal, Tensor x, Tensor weight, Tensor? bias, "
      "Tensor cu, Tensor? state, bool silu, bool[] need) "
      "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dstate)");
  m.def(
      "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu, "
      "Tensor? state, float scale, bool l2norm, bool keep_state) "
      "-> (Tensor out, Tensor final_state)");
  m.def(
      "gated_delta_rule_backward(Tensor dout, Tensor? dfinal, Tensor q, Tensor k, Tensor v, "
      "Tensor g, Tensor beta, Tensor cu, Tensor? state, float scale, bool l2norm) "
      "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dstate)");
  m.def(
      "rms_norm_gated(Tensor x, Tensor z, Tensor? weight, float eps, int gate, "
      "bool round_before_weight) -> Tensor");
  m.def(
      "rms_norm_gated_backward(Tensor dy, Tensor x, Tensor z, Tensor? weight, float eps, int gate, "
      "bool round_before_weight) -> (Tensor dx, Tensor dz, Tensor dweight)");
  m.def("silu_mul(Tensor gate, Tensor up) -> Tensor");
  m.def("silu_mul_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  m.def("gelu_mul(Tensor gate, Tensor up, bool tanh) -> Tensor");
  m.def("gelu_mul_backward(Tensor dy, Tensor gate, Tensor up, bool tanh) -> (Tensor, Tensor)");
  m.def("rotary_frequencies(int kind, int size, float[] numbers) -> float[]");
  m.def(
      "rotary_angles(Tensor positions, Tensor frequencies, float scaling, ScalarType dtype) "
      "-> (Tensor, Tensor)");
  m.def("seeded_dropout(Tensor x, Tensor seed, int stream, float probability) -> Tensor");
  m.def(
      "seeded_dropout_part(Tensor x, Tensor seed, int stream, float probability, int first) "
      "-> Tensor");
  m.def(
      "rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, "
      "float eps, bool one_plus_weight, bool round_before_weight, bool interleaved) "
      "-> (Tensor, Tensor)");
  m.def(
      "rotary_backward(Tensor dq, Tensor dk, Tensor? q, Tensor? k, Tensor cos, Tensor sin, "
      "Tensor? q_weight, Tensor? k_weight, float eps, bool one_plus_weight, "
      "bool round_before_weight, bool interleaved, bool need_dweight) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "pack(Tensor lengths, int capacity, int max_documents, int strategy, int overlong) "
      "-> Tensor[]");
  m.def(
      "pack_stream(Tensor lengths, Tensor open, int next_row, int capacity, int max_documents, "
      "int max_open) -> Tensor[]");
  m.def("offload(Tensor x, int file, int slot) -> Tensor");
  m.def("reload(Tensor handle, Tensor after) -> Tensor");
  m.def("wait(Tensor handle, Tensor after, SymInt[] shape, ScalarType dtype) -> Tensor");
  m.def("spill_open(Tensor folder) -> int");
  m.def("spill_close(int file) -> ()");
  m.def("spill_same(Tensor handle, Tensor bytes) -> bool");
  m.def("spill_counts(int file) -> int[]");
  m.def("checkpoint_sha256(Tensor folder) -> int[]");
  m.def("read_gguf(Tensor file) -> Tensor");
  m.def("system_info() -> int[]");
  m.def("read_ahead_open(int[] tensors, int[] files, int allowed) -> int");
  m.def("read_ahead_close(int number) -> ()");
  m.def("read_ahead_numbers(int number) -> int[]");
  m.def("read_ahead_events(int number) -> int[]");
}

}  // namespace monograph::ops
