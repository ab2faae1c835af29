#include "expert_matmul.h"

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "primitive.h"

namespace mlxdist {

namespace mx = mlx::core;

/* One matrix: element (o, i) of `out` rows and `in` columns is at data[o * row + i * column]. */
struct Matrix {
  const float* data;
  int64_t out, in, row, column;
};

/* Columns in memory one after the other, as the layers of experts keep them: four at once, each output read once. */
static void add_columns(const Matrix& m, const float* __restrict x, float* __restrict y) {
  int64_t i = 0;
  for (; i + 4 <= m.in; i += 4) {
    const float* w0 = m.data + i * m.column;
    const float *w1 = w0 + m.column, *w2 = w1 + m.column, *w3 = w2 + m.column;
    const float x0 = x[i], x1 = x[i + 1], x2 = x[i + 2], x3 = x[i + 3];
    for (int64_t o = 0; o < m.out; o++) y[o] += (x0 * w0[o] + x1 * w1[o]) + (x2 * w2[o] + x3 * w3[o]);
  }
  for (; i < m.in; i++)
    for (int64_t o = 0; o < m.out; o++) y[o] += x[i] * m.data[i * m.column + o];
}

static void multiply(const Matrix& m, const float* x, float* y) {
  if (m.row == 1) return add_columns(m, x, y);
  for (int64_t o = 0; o < m.out; o++)
    for (int64_t i = 0; i < m.in; i++) y[o] += m.data[o * m.row + i * m.column] * x[i];
}

static void multiply_all(const mx::array& rows, const mx::array& weights, const mx::array& experts, mx::array& out) {
  const int64_t tokens = experts.shape(0), k = experts.shape(1), rows_each = rows.shape(1);
  const auto* chosen = experts.data<uint32_t>();
  const auto* x = rows.data<float>();
  auto* y = out.data<float>();
  Matrix matrix{nullptr, weights.shape(1), weights.shape(2), weights.strides()[1], weights.strides()[2]};
  std::fill_n(y, tokens * k * matrix.out, 0.0f);
  for (int64_t pair = 0; pair < tokens * k; pair++) {
    if (chosen[pair] >= static_cast<uint32_t>(weights.shape(0))) continue;
    matrix.data = weights.data<float>() + chosen[pair] * weights.strides()[0];
    int64_t row = rows_each == 1 ? pair / k : pair;
    multiply(matrix, x + row * matrix.in, y + pair * matrix.out);
  }
}

class ExpertMatmul : public mx::Primitive {
 public:
  explicit ExpertMatmul(mx::Stream stream) : mx::Primitive(stream) {}
  const char* name() const override { return "ExpertMatmul"; }

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    allocate(outputs[0]);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const auto& input : inputs) encoder.set_input_array(input);
    encoder.set_output_array(outputs[0]);
    encoder.dispatch(
        [rows = mx::array::unsafe_weak_copy(inputs[0]), weights = mx::array::unsafe_weak_copy(inputs[1]),
         experts = mx::array::unsafe_weak_copy(inputs[2]),
         out = mx::array::unsafe_weak_copy(outputs[0])]() mutable { multiply_all(rows, weights, experts, out); });
  }
  void eval_gpu(const Arrays&, Arrays&) override { throw std::runtime_error("ExpertMatmul is for the CPU"); }
};

mx::array expert_matmul(const mx::array& rows, const mx::array& weights, const mx::array& experts) {
  bool fits = rows.dtype() == mx::float32 && weights.dtype() == mx::float32 && experts.dtype() == mx::uint32 &&
              rows.ndim() == 3 && weights.ndim() == 3 && experts.ndim() == 2 && rows.shape(0) == experts.shape(0) &&
              (rows.shape(1) == 1 || rows.shape(1) == experts.shape(1)) && rows.shape(2) == weights.shape(2);
  if (!fits) throw std::invalid_argument("expert_matmul: rows, weights and experts do not fit");
  auto stream = mx::default_stream(mx::Device::cpu);
  mx::Shape shape{experts.shape(0), experts.shape(1), weights.shape(1)};
  return mx::array(std::move(shape), mx::float32, std::make_shared<ExpertMatmul>(stream),
                   {mx::contiguous(rows, false, stream), weights, mx::contiguous(experts, false, stream)});
}

}  // namespace mlxdist
