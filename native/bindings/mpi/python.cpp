#include "python.h"

#include <stdexcept>
#include <string>

#include <dlfcn.h>

#include "communicator.h"

namespace mlxdist::python {

/* A function or variable of the process, looked up by its name; it becomes a pointer of the type that is wanted. */
struct Symbol {
  const char* name;
  template <class Type>
  operator Type*() const {
    void* address = dlsym(RTLD_DEFAULT, name);
    if (address != nullptr) return reinterpret_cast<Type*>(address);
    throw Error(
        MLXDIST_INVALID_ARGUMENT,
        "mx.distributed: this process has no Python interpreter (" + std::string(name) +
            " is not in memory), and mlxdist needs one to join the other ranks: write the program in Python, or unset "
            "MLX_MPI_LIBNAME to run it without mlxdist");
  }
};

/* Python's stable ABI, as far as it is used here: objects are opaque, PyGILState_STATE is an enum. */
struct Object;

struct Api {
  int (*Py_IsInitialized)() = Symbol{"Py_IsInitialized"};
  int (*PyGILState_Ensure)() = Symbol{"PyGILState_Ensure"};
  void (*PyGILState_Release)(int state) = Symbol{"PyGILState_Release"};
  int (*PyGILState_Check)() = Symbol{"PyGILState_Check"};
  void* (*PyEval_SaveThread)() = Symbol{"PyEval_SaveThread"};
  void (*PyEval_RestoreThread)(void* state) = Symbol{"PyEval_RestoreThread"};
  Object* (*PyImport_ImportModule)(const char* name) = Symbol{"PyImport_ImportModule"};
  Object* (*PyObject_CallMethod)(Object* object, const char* name, const char* format,
                                 ...) = Symbol{"PyObject_CallMethod"};
  int (*PyArg_ParseTuple)(Object* tuple, const char* format, ...) = Symbol{"PyArg_ParseTuple"};
  void (*PyErr_Fetch)(Object** type, Object** value, Object** traceback) = Symbol{"PyErr_Fetch"};
  int (*PyErr_ExceptionMatches)(Object* type) = Symbol{"PyErr_ExceptionMatches"};
  void (*PyErr_SetInterrupt)() = Symbol{"PyErr_SetInterrupt"};
  Object** PyExc_KeyboardInterrupt = Symbol{"PyExc_KeyboardInterrupt"};
  Object* (*PyObject_Str)(Object* object) = Symbol{"PyObject_Str"};
  const char* (*PyUnicode_AsUTF8AndSize)(Object* text, intptr_t* size) = Symbol{"PyUnicode_AsUTF8AndSize"};
  void (*PyErr_Clear)() = Symbol{"PyErr_Clear"};
  void (*Py_DecRef)(Object* object) = Symbol{"Py_DecRef"};

  Api() {
    if (Py_IsInitialized()) return;
    throw Error(MLXDIST_INVALID_ARGUMENT, "mx.distributed: the Python interpreter of this process does not run");
  }
};

static const Api& api() {
  static const Api found;
  return found;
}

/* The interpreter for this thread, whether it has it already or not. */
class Interpreter {
 public:
  Interpreter() : state_(api().PyGILState_Ensure()) {}
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;
  ~Interpreter() {  // NOLINT(bugprone-exception-escape): the constructor has looked the functions up
    api().PyGILState_Release(state_);
  }

 private:
  int state_;
};

/* A reference that is let go. */
class Reference {
 public:
  explicit Reference(Object* object) : object_(object) {}
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference() {  // NOLINT(bugprone-exception-escape): as above
    api().Py_DecRef(object_);
  } /* takes null */
  operator Object*() const { return object_; }

 private:
  Object* object_;
};

/* Takes the current exception. */
static std::string error_text() {
  Object *type, *value, *traceback;
  api().PyErr_Fetch(&type, &value, &traceback);
  Reference first(type), second(value), third(traceback);
  Reference text(api().PyObject_Str(value != nullptr ? value : type));
  const char* characters = text == nullptr ? nullptr : api().PyUnicode_AsUTF8AndSize(text, nullptr);
  std::string result = characters == nullptr ? "an exception without text" : characters;
  api().PyErr_Clear();
  return result;
}

/* Throws what kept a function from running. Ctrl-C comes once more when this thread is back in Python: the bridge's
 * translator looks for signals before it raises what it was thrown. */
[[noreturn]] static void throw_error(const char* function) {
  bool interrupted = api().PyErr_ExceptionMatches(*api().PyExc_KeyboardInterrupt);
  std::string text = error_text();
  if (!interrupted)
    throw Error(MLXDIST_INVALID_ARGUMENT, "mlxdist.runtime.mpi_shim." + std::string(function) + ": " + text);
  api().PyErr_SetInterrupt();
  throw Error(MLXDIST_ABORTED, "interrupted (SIGINT)");
}

bool is_running() { return api().Py_IsInitialized(); }

Result call(const char* function, uintptr_t first_argument, uintptr_t second_argument) {
  Interpreter interpreter;
  Reference module(api().PyImport_ImportModule("mlxdist.runtime.mpi_shim"));
  if (module == nullptr) {
    throw Error(MLXDIST_INVALID_ARGUMENT, "mx.distributed: mlxdist does not load in this Python: " + error_text() +
                                              "; install mlxdist into the Python that runs the ranks");
  }
  unsigned long long first = first_argument, second = second_argument;
  Reference result(api().PyObject_CallMethod(module, function, "KK", first, second));
  const char* text;
  if (result == nullptr || !api().PyArg_ParseTuple(result, "sKK", &text, &first, &second)) throw_error(function);
  if (*text != '\0') throw std::runtime_error(text);
  return {static_cast<uintptr_t>(first), static_cast<uintptr_t>(second)};
}

GilRelease::GilRelease() : state_(api().PyGILState_Check() ? api().PyEval_SaveThread() : nullptr) {}

GilRelease::~GilRelease() {  // NOLINT(bugprone-exception-escape): as above
  if (state_ != nullptr) api().PyEval_RestoreThread(state_);
}

}  // namespace mlxdist::python
