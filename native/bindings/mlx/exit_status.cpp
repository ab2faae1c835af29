#include "exit_status.h"

#include <Python.h>

#include <stdexcept>
#include <thread>

namespace mlxdist {

static PyObject* code_of; /* the descriptor of SystemExit.code as it was */
static std::thread::id main_thread;
static std::optional<int> noted;

static int status_of(PyObject* code) {
  if (code == Py_None) return 0;
  if (!PyLong_Check(code)) return 1;
  int status = static_cast<int>(PyLong_AsLong(code) & 0xff); /* -1 where it does not fit, as in the interpreter */
  PyErr_Clear();
  return status;
}

static PyObject* read_code(PyObject* error, void*) {
  PyObject* code = Py_TYPE(code_of)->tp_descr_get(code_of, error, nullptr);
  if (code != nullptr && std::this_thread::get_id() == main_thread && PyEval_GetFrame() == nullptr)
    noted = status_of(code);
  return code;
}

static int write_code(PyObject* error, PyObject* code, void*) {
  return Py_TYPE(code_of)->tp_descr_set(code_of, error, code);
}

static PyObject* dict_of(PyTypeObject* type) {
#if PY_VERSION_HEX >= 0x030C0000
  return PyType_GetDict(type);
#else
  return Py_NewRef(type->tp_dict);
#endif
}

/* The attribute of the type itself, not a type in its place: `except SystemExit` and Python's own code compare with it.
 * Classes derived from it have the attribute as well. */
void watch_exits() {
  static PyGetSetDef code = {"code", read_code, write_code, "exception code", nullptr};
  auto* type = reinterpret_cast<PyTypeObject*>(PyExc_SystemExit);
  if (code_of != nullptr) return;
  main_thread = std::this_thread::get_id();
  PyObject* dict = dict_of(type);
  PyObject* watched = PyDescr_NewGetSet(type, &code);
  code_of = Py_XNewRef(PyDict_GetItemString(dict, "code"));
  if (watched == nullptr || code_of == nullptr || PyDict_SetItemString(dict, "code", watched) != 0)
    throw std::runtime_error("SystemExit.code cannot be watched");
  PyType_Modified(type);
  Py_DECREF(watched);
  Py_DECREF(dict);
}

std::optional<int> exit_status() { return noted; }

}  // namespace mlxdist
