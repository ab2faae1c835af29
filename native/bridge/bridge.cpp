/* The Python module mlxdist._bridge. Import mlx.core first: the loader finds libmlx only in memory. */
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "connection.h"
#include "group.h"
#include "interpreter.h"
#include "line.h"
#include "operations.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace mlxdist {

static std::shared_ptr<Connection> connect(uintptr_t group) {
  if (group == 0) return std::make_shared<Connection>(nullptr, 0, 1);
  auto* native = reinterpret_cast<mlxdist_group*>(group);
  return std::make_shared<Connection>(native, mlxdist_group_rank(native), mlxdist_group_size(native));
}

/* An error of a stream is raised where its array is evaluated, and one that cannot be waited for has nothing to do. */
static void wait_for_cpu_streams() {
  InterpreterRuns others_run;
  for (const auto& stream : mx::get_streams()) {
    if (stream.device != mx::Device::cpu) continue;
    try {
      mx::synchronize(stream);
    } catch (const std::exception&) {
      continue;
    }
  }
}

NB_MODULE(_bridge, m) {
  nb::module_::import_("mlx.core"); /* registers the types of arrays, streams and groups */

  m.def(
      "set_error_factory",
      [](nb::callable make_error) { set_error_factory(make_error.release().ptr()); },
      "make_error"_a,
      "make_error(status, text) returns the exception to raise for an error of the engine.");
  m.def(
      "raise_soon",
      [] {
        return reinterpret_cast<uintptr_t>(
            +[](int status, const char* text) { raise_soon(Error(status, text)); });
      },
      "Address of void raise_soon(int status, const char *text), which any thread may call.");

  m.def("wait_for_cpu_streams", &wait_for_cpu_streams,
        "Returns when the CPU streams of MLX, of all threads, have done what they have to do now.");
  m.def("set_own_folders", &set_own_folders, "mlxdist"_a, "mlx"_a,
        "Tells which frames are not the program's: those of files in these folders, whose names end with a slash.");
  m.def("mark_line", [] { mlxdist_set_place(current_line().at); },
        "The operations that this thread starts next come from the line of the program that has called mlxdist.");
  m.def("line_of", [](nb::handle frame) { return line_of(reinterpret_cast<PyFrameObject*>(frame.ptr())).at; },
        "frame"_a, "The line of the program that a frame belongs to (\"train.py:88\"), or \"\".");

  nb::class_<Connection>(m, "Connection")
      .def_prop_ro("rank", &Connection::rank)
      .def_prop_ro("size", &Connection::size)
      .def_prop_ro("group", [](const Connection& c) { return reinterpret_cast<uintptr_t>(c.group()); })
      .def("mlx_group",
           [](std::shared_ptr<Connection> connection, double timeout) {
             return mx::distributed::Group(std::make_shared<Group>(std::move(connection), timeout));
           },
           "timeout"_a = -1.0)
      .def("split", &Connection::split, "color"_a, "key"_a)
      .def_prop_ro("told_error", &Connection::told_error)
      .def_prop_ro("is_busy", &Connection::is_busy)
      .def("keep_errors", &Connection::keep_errors)
      .def("drain", &Connection::drain, "seconds"_a)
      .def("close", &Connection::close);

  m.def("connect", &connect, "group"_a, "Makes the engine's group (its address; 0: a group of one) usable by MLX.");
  m.def("all_reduce", &all_reduce, "x"_a, "connection"_a, "op"_a, "stream"_a = nb::none(), "timeout"_a = -1.0);
  m.def("all_gather", &all_gather, "x"_a, "connection"_a, "stream"_a = nb::none(), "timeout"_a = -1.0);
  m.def("reduce_scatter", &reduce_scatter, "x"_a, "connection"_a, "op"_a, "stream"_a = nb::none(), "timeout"_a = -1.0);
  m.def("broadcast", &broadcast, "x"_a, "connection"_a, "root"_a, "stream"_a = nb::none(), "timeout"_a = -1.0);
  m.def("reduce", &reduce, "x"_a, "connection"_a, "op"_a, "root"_a, "stream"_a = nb::none(), "timeout"_a = -1.0);
  m.def("gather", &gather, "x"_a, "connection"_a, "root"_a, "stream"_a = nb::none(), "timeout"_a = -1.0);
  m.def("scatter", &scatter, "x"_a, "connection"_a, "root"_a, "stream"_a = nb::none(), "timeout"_a = -1.0);
  m.def("all_to_all", &all_to_all, "x"_a, "connection"_a, "stream"_a = nb::none(), "timeout"_a = -1.0);
  m.def("all_to_all_v", &all_to_all_v, "x"_a, "connection"_a, "send_counts"_a, "receive_counts"_a,
        "stream"_a = nb::none(), "timeout"_a = -1.0);
  m.def("sendrecv", &sendrecv, "x"_a, "connection"_a, "to"_a, "from"_a, "shape"_a, "dtype"_a,
        "stream"_a = nb::none(), "timeout"_a = -1.0);
}

} // namespace mlxdist
