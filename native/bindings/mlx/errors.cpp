#include "errors.h"

#include <chrono>
#include <cstdlib>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string_view>

#include <nanobind/nanobind.h>

#include "connection.h"
#include "failed_arrays.h"

namespace nb = nanobind;

namespace mlxdist {

static constexpr std::string_view tag = "[mlxdist ";

static PyObject* make_error;             /* set once, before any error */
static thread_local bool makes_an_error; /* this thread, in make_error: Python code, which holds locks */

/* The first error while Python has not seen it. Never destroyed: MLX's threads outlive the statics. */
static auto& undelivered_mutex = *new std::mutex;
static auto& undelivered_changed = *new std::condition_variable;
static auto& undelivered = *new std::optional<std::string>;

/* For another thread of Python whose evaluation has just failed, to raise the error itself. */
constexpr auto delivery_delay = std::chrono::milliseconds(50);

static std::optional<std::string> take_undelivered() {
  std::lock_guard lock(undelivered_mutex);
  undelivered_changed.notify_all();
  return std::exchange(undelivered, std::nullopt);
}

static bool is_ours(const std::string& what) { return what.compare(0, tag.size(), tag) == 0; }

/* Sets the Python exception for the text of an Error; or that of a handler of a signal that has come: Ctrl-C may be
 * what has ended the operation, and then goes before its error. */
static void set_python_error(const std::string& what) {
  fail_arrays();
  if (PyErr_CheckSignals() != 0) return;
  char* text;
  int status = static_cast<int>(std::strtol(what.c_str() + tag.size(), &text, 10));
  makes_an_error = true;
  try {
    nb::object instance = nb::borrow(make_error)(status, text + 2); /* after "] " */
    PyErr_SetObject(instance.type().ptr(), instance.ptr());
  } catch (nb::python_error& error) {
    error.restore();
  }
  makes_an_error = false;
}

/* macOS ends GPU work that waits for about 5 s; MLX raises that with Metal's text, which names no rank. If a rank was
 * late for an operation, the result is the error that names it. The group has then failed with it. */
static std::optional<Error> explain_gpu_timeout(std::string_view what) {
  bool is_timeout = what.find("kIOGPUCommandBufferCallbackErrorTimeout") != what.npos ||
                    what.find("Caused GPU Timeout Error") != what.npos;
  auto world = is_timeout ? Connection::world() : nullptr;
  return world ? world->explain_gpu_timeout() : std::nullopt;
}

static void translate(const std::exception_ptr& exception, void*) {
  try {
    std::rethrow_exception(exception);
  } catch (const std::runtime_error& error) {
    auto explained = is_ours(error.what()) ? std::nullopt : explain_gpu_timeout(error.what());
    if (!is_ours(error.what()) && !explained) throw;
    take_undelivered(); /* this error is it, or comes before it */
    set_python_error(explained ? explained->what() : error.what());
  }
}

/* Called by the interpreter in the main thread, between two steps of the program. */
static int deliver(void*) {
  if (makes_an_error) return 0; /* one is on its way; this one still is at the next evaluation */
  {
    nb::gil_scoped_release gil;
    std::unique_lock lock(undelivered_mutex);
    undelivered_changed.wait_for(lock, delivery_delay, [] { return !undelivered; });
  }
  auto what = take_undelivered();
  if (!what) return 0;
  set_python_error(*what);
  return -1;
}

void raise_async(const Error& error) {
  {
    std::lock_guard lock(undelivered_mutex);
    undelivered = error.what();
  }
  Py_AddPendingCall(deliver, nullptr); /* if its queue is full, the error still is at the next evaluation */
}

void forget_errors() {
  take_undelivered();
  forget_failures();
}

void set_error_factory(void* factory) {
  make_error = static_cast<PyObject*>(factory);
  nb::register_exception_translator(translate, nullptr);
}

}  // namespace mlxdist
