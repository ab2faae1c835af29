#include "call_site.h"

#include <chrono>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <unordered_set>

namespace mlxdist {

/* Guarded by the GIL, and never destroyed: MLX's threads outlive the statics. */
static std::string& own_directory = *new std::string;
static std::string& mlx_directory = *new std::string;
static auto& texts = *new std::unordered_set<std::string>;

/* Cache by instruction: the lookup of a line walks through a table. */
struct Seen {
  PyCodeObject* code; /* a reference: other code could otherwise get this address */
  long instruction;
  CallSite site;
};
static Seen seen[1024];

/* Code of mlxdist and MLX, likewise kept: frames of it are skipped without a lookup of their line. */
static PyCodeObject* skipped[256];

/* A program that makes code as it runs must not fill the memory. */
constexpr size_t max_texts = 65536;

/* Operations that follow each other so soon are parts of one graph. */
constexpr auto same_graph = std::chrono::microseconds(20);

static thread_local CallSite noted;
static thread_local std::chrono::steady_clock::time_point noted_at;

constexpr std::string_view nearby = "near ";

static bool begins_with(std::string_view text, std::string_view start) {
  return !start.empty() && text.substr(0, start.size()) == start;
}

static std::string_view file_of(PyCodeObject* code) {
  Py_ssize_t size = 0;
  PyObject* name = PyObject_GetAttrString(reinterpret_cast<PyObject*>(code), "co_filename");
  const char* text = name == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(name, &size);
  Py_XDECREF(name); /* the code has it, too */
  if (text == nullptr) PyErr_Clear();
  return text == nullptr ? std::string_view() : std::string_view(text, size);
}

/* "train.py"; "layers/__init__.py", since there are many of these. */
static std::string_view short_name(std::string_view file) {
  size_t slash = file.rfind('/');
  if (slash == std::string_view::npos) return file;
  if (begins_with(file.substr(slash + 1), "__") && slash > 0) slash = file.rfind('/', slash - 1);
  return slash == std::string_view::npos ? file : file.substr(slash + 1);
}

static CallSite make_call_site(PyFrameObject* frame, std::string_view file) {
  auto text = std::string(nearby).append(short_name(file)) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
  if (texts.size() >= max_texts && !texts.contains(text)) return {};
  const char* kept = texts.insert(std::move(text)).first->c_str();
  return {kept + nearby.size(), kept};
}

/* By its attribute, 35 to 55 ns: nanobind lets Apple's linker leave only some of Python's functions undefined, and
 * PyFrame_GetLasti is none of them. PyFrame_GetLineNumber is one; at the end of a long function it takes 13 us. */
static long instruction_of(PyFrameObject* frame) {
  static PyObject* const name = PyUnicode_InternFromString("f_lasti");
  PyObject* value = name == nullptr ? nullptr : PyObject_GetAttr(reinterpret_cast<PyObject*>(frame), name);
  long instruction = value == nullptr ? -1 : PyLong_AsLong(value);
  Py_XDECREF(value);
  if (instruction < 0) PyErr_Clear();
  return instruction;
}

template <size_t size>
static size_t slot_of(PyCodeObject* code, long instruction = 0) {
  return (reinterpret_cast<uintptr_t>(code) / 16 + instruction) % size;
}

static bool is_skipped(std::string_view file) {
  if (file.empty() || begins_with(file, "<frozen ")) return true;
  return begins_with(file, own_directory) || begins_with(file, mlx_directory);
}

/* false if the frame is skipped. */
static bool look_up(PyFrameObject* frame, PyCodeObject* code, CallSite& site) {
  PyCodeObject*& skips = skipped[slot_of<std::size(skipped)>(code)];
  if (skips == code) return false;
  long instruction = instruction_of(frame);
  Seen& entry = seen[slot_of<std::size(seen)>(code, instruction)];
  if (entry.code != code || entry.instruction != instruction) {
    auto file = file_of(code);
    bool skip = is_skipped(file);
    Py_INCREF(code);
    Py_XDECREF(skip ? skips : entry.code);
    if (skip) {
      skips = code;
      return false;
    }
    entry = {code, instruction, make_call_site(frame, file)};
  }
  site = entry.site;
  return true;
}

void set_own_directories(const char* mlxdist, const char* mlx) {
  own_directory = mlxdist;
  mlx_directory = mlx;
}

CallSite call_site_of(PyFrameObject* frame) {
  CallSite site = {};
  Py_XINCREF(frame);
  while (frame != nullptr) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    bool found = look_up(frame, code, site);
    Py_DECREF(code);
    PyFrameObject* caller = found ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = caller;
  }
  return site;
}

CallSite current_call_site() {
  if (!PyGILState_Check()) return {};
  return call_site_of(PyEval_GetFrame());
}

void note_call_site() {
  auto now = std::chrono::steady_clock::now();
  if (now - noted_at < same_graph) return;
  noted_at = now;
  noted = current_call_site();
}

CallSite noted_call_site() { return noted; }

}  // namespace mlxdist
