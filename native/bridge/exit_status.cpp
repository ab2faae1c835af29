#include "exit_status.h"

#include <Python.h>

#include <thread>

namespace mlxdist {

static destructor drop;
static std::thread::id main_thread;
static std::optional<int> noted;

static int status_of(PyObject* code) {
  if (code == nullptr || code == Py_None) return 0;
  return PyLong_Check(code) ? static_cast<int>(PyLong_AsUnsignedLongMask(code) & 0xff) : 1;
}

static void note_and_drop(PyObject* error) {
  if (std::this_thread::get_id() == main_thread && PyEval_GetFrame() == nullptr)
    noted = status_of(reinterpret_cast<PySystemExitObject*>(error)->code);
  drop(error);
}

/* The type itself, not one in its place: `except SystemExit` and Python's own code compare with it. Classes derived
 * from it come through here as well. */
void watch_exits() {
  auto* type = reinterpret_cast<PyTypeObject*>(PyExc_SystemExit);
  if (drop != nullptr) return;
  main_thread = std::this_thread::get_id();
  drop = type->tp_dealloc;
  type->tp_dealloc = note_and_drop;
}

std::optional<int> exit_status() { return noted; }

} // namespace mlxdist
