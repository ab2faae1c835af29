/* The Python module mlxdist._bridge. Import mlx.core first: the loader finds libmlx only in memory. */
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/variant.h>

#include "all_prod.h"
#include "broadcast.h"
#include "connection.h"
#include "group.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace mlxdist {

static std::shared_ptr<Connection> connect(uintptr_t group) {
  if (group == 0) return std::make_shared<Connection>(nullptr, 0, 1);
  auto* native = reinterpret_cast<mlxdist_group*>(group);
  return std::make_shared<Connection>(native, mlxdist_group_rank(native), mlxdist_group_size(native));
}

NB_MODULE(_bridge, m) {
  nb::module_::import_("mlx.core"); /* registers the types of arrays, streams and groups */

  m.def(
      "set_error_factory",
      [](nb::callable make_error) { set_error_factory(make_error.release().ptr()); },
      "make_error"_a,
      "make_error(status, text) returns the exception to raise for an error of the engine.");

  nb::class_<Connection>(m, "Connection")
      .def("mlx_group",
           [](std::shared_ptr<Connection> connection) {
             return mx::distributed::Group(std::make_shared<Group>(std::move(connection)));
           })
      .def("drain", &Connection::drain, "seconds"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Connection::close, nb::call_guard<nb::gil_scoped_release>());

  m.def("connect", &connect, "group"_a, "Makes the engine's group (its address; 0: a group of one) usable by MLX.");
  m.def("broadcast", &broadcast, "x"_a, "connection"_a, "root"_a, "stream"_a = nb::none());
  m.def("all_prod", &all_prod, "x"_a, "connection"_a, "stream"_a = nb::none());
}

} // namespace mlxdist
