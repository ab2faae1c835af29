#include "failed_arrays.h"

#include <memory>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

#include "mlx/primitives.h"
#include "mlx/scheduler.h"
#include "mlx/stream.h"

namespace nb = nanobind;

namespace mlxdist {

namespace mx = mlx::core;

/* Never destroyed: MLX's threads outlive the statics. */
static auto& mutex = *new std::mutex;
static auto& failure = *new std::optional<Error>;
static bool has_failed;       /* an operation of this world */
static PyObject* get_objects; /* of gc; kept for ever */

/* What takes the place of an array's past. */
class Failed : public mx::Primitive {
 public:
  Failed(mx::Stream stream, Error error) : mx::Primitive(stream), error_(std::move(error)) {}
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override { throw error_; }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override { throw error_; }
  const char* name() const override { return "Failed"; }

 private:
  const Error error_;
};

void load_collector() { get_objects = nb::getattr(nb::module_::import_("gc"), "get_objects").release().ptr(); }

void note_failure(const Error& error) {
  std::lock_guard lock(mutex);
  has_failed = true;
  if (!failure) failure.emplace(error);
}

/* `root`, or what it is to be computed from, as far as MLX counts it as computed and not yet as available. */
static void fail(const mx::array& root, const std::shared_ptr<mx::Primitive>& failed,
                 std::unordered_set<uintptr_t>& seen) {
  std::vector<mx::array> left{root};
  while (!left.empty()) {
    auto x = std::move(left.back());
    left.pop_back();
    if (!seen.insert(x.id()).second) continue;
    if (x.status() == mx::array::Status::unscheduled) {
      left.insert(left.end(), x.inputs().begin(), x.inputs().end());
    } else if (x.status() == mx::array::Status::evaluated) {
      x.inputs().clear();
      x.primitive_ptr() = failed;
      x.set_status(mx::array::Status::unscheduled);
    }
  }
}

void fail_arrays() {
  std::optional<Error> error;
  {
    std::lock_guard lock(mutex);
    if (!failure) return;
    error.emplace(*failure); /* errors are not assigned: libc++ keeps that for itself on macOS */
    failure.reset();
  }
  static const auto stream = mx::new_thread_unsafe_stream(mx::Device::cpu); /* any thread may read */
  std::shared_ptr<mx::Primitive> failed = std::make_shared<Failed>(stream, *error);
  std::unordered_set<uintptr_t> seen;
  nb::object objects = nb::handle(get_objects)();
  for (nb::handle object : objects) {
    if (nb::isinstance<mx::array>(object)) fail(*nb::inst_ptr<mx::array>(object), failed, seen);
  }
}

void forget_failures() {
  fail_arrays();
  {
    std::lock_guard lock(mutex);
    if (!std::exchange(has_failed, false)) return;
  }
  for (auto stream : mx::get_streams()) {
    if (stream.device != mx::Device::cpu) continue;
    try {
      mx::scheduler::check_error(stream);
    } catch (const std::exception&) {
      continue; /* the arrays of before raise theirs */
    }
  }
}

}  // namespace mlxdist
