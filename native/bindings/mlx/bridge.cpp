/* The Python module mlxdist._bridge. Import mlx.core first: the loader finds libmlx only in memory. */
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "mlx/scheduler.h"

#include "connection.h"
#include "exit_status.h"
#include "expert_matmul.h"
#include "failed_arrays.h"
#include "group.h"
#include "gil.h"
#include "call_site.h"
#include "operations.h"
#include "stream_task.h"
#include "time_stamp.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace mlxdist {

/* Linux makes pages of 2 MiB at once where it is asked, and else one of 4 KiB for each fault. */
static void prefer_huge_pages(uintptr_t begin, uintptr_t end) {
#ifdef __linux__
  const uintptr_t huge = 2 << 20;
  begin = (begin + huge - 1) & ~(huge - 1);
  end &= ~(huge - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)begin, (void)end;
#endif
}

/* zeros() would write its memory first, which takes longer than to read as many bytes from the page cache. */
static mx::array uninitialized(const std::vector<int>& shape, mx::Dtype dtype) {
  mx::array out(mx::Shape(shape.begin(), shape.end()), dtype, nullptr, {});
  allocate(out);
  out.set_status(mx::array::Status::available);
  auto begin = reinterpret_cast<uintptr_t>(out.data<char>());
  prefer_huge_pages(begin, begin + out.nbytes());
  return out;
}

static std::shared_ptr<Connection> connect(uintptr_t group) {
  return Connection::connect(reinterpret_cast<mlxdist_group*>(group));
}

/* `text` is the label of the collectives in that stream. `messages`: those that it sends and receives have an order. */
static void label_stream(const mx::Stream& stream, const std::string& text, bool messages, uintptr_t label_thread) {
  uint64_t label = mlxdist_label(text.c_str());
  mx::scheduler::enqueue(stream, [=] { reinterpret_cast<void (*)(uint64_t, bool)>(label_thread)(label, messages); });
}

/* Of the thread that has called mx.distributed.init(): its default one then. */
static thread_local std::optional<mx::Stream> stream_of_messages;

static void label_streams(uintptr_t label_thread) {
  stream_of_messages = mx::default_stream(mx::Device::cpu);
  int number = 0;
  for (const auto& stream : mx::get_streams()) {
    if (stream.device != mx::Device::cpu) continue;
    label_stream(stream, "CPU stream " + std::to_string(++number), stream == *stream_of_messages, label_thread);
  }
}

static bool is_own(const mx::distributed::Group& group) {
  return dynamic_cast<Group*>(group.raw_group().get()) != nullptr;
}

/* Streams belong to the thread that uses them. mlxdist's own groups need no such order. A group that is gone may leave
 * its address to a later one, and its stream with it: any stream will do, if it is one. Messages of the thread that has
 * called mx.distributed.init() are in that one's stream, where those of functions that were imported before are. */
static mx::Stream one_stream(const std::optional<mx::distributed::Group>& group, int way, mx::StreamOrDevice s,
                             uintptr_t label_thread) {
  static thread_local std::map<std::pair<const void*, int>, mx::Stream> streams;
  static std::mutex mutex;
  static std::unordered_map<int, std::pair<std::string, bool>> known;
  auto stream = mx::to_stream(s, mx::Device::cpu);
  if (stream.device != mx::Device::cpu) return stream; /* which MLX refuses */
  auto members = group ? *group : mx::distributed::init();
  if (is_own(members)) return stream;
  bool is_message = way >= 0;
  if (is_message && stream_of_messages) stream = *stream_of_messages;
  stream = streams.try_emplace({members.raw_group().get(), way}, stream).first->second;
  std::lock_guard lock(mutex);
  auto [found, is_new] = known.try_emplace(stream.index, "stream " + std::to_string(known.size() + 1), is_message);
  auto& [text, messages] = found->second;
  if (is_new || (is_message && !messages)) label_stream(stream, text, is_message, label_thread);
  messages = messages || is_message;
  return stream;
}

/* An error of a stream is raised where its array is evaluated, and one that cannot be waited for has nothing to do. */
static void wait_for_cpu_streams() {
  GilRelease gil;
  for (const auto& stream : mx::get_streams()) {
    if (stream.device != mx::Device::cpu) continue;
    try {
      mx::synchronize(stream);
    } catch (const std::exception&) {
      continue;
    }
  }
}

/* Whether an array is the zeros that MLX makes of what has no gradient, or a sum of such: a product may be zero by its
 * values alone. */
static bool is_zeros(const mx::array& array) {
  if (!array.has_primitive()) {
    if (array.size() != 1 || array.status() != mx::array::Status::available) return false;
    const auto* bytes = array.data<uint8_t>();
    return std::all_of(bytes, bytes + array.itemsize(), [](uint8_t byte) { return byte == 0; });
  }
  static const std::unordered_set<std::string> kept = {"Add", "AsType", "Broadcast", "Full"};
  const auto& inputs = array.inputs();
  return kept.count(array.primitive().name()) && std::all_of(inputs.begin(), inputs.end(), is_zeros);
}

/* MLX says it only of an array: one that is always a tracer is seen as such while there is something to trace. */
static bool traces() {
  static const mx::array* probe = [] {
    auto* array = new mx::array(0.0f); /* never freed: MLX may be gone when the process ends */
    array->set_tracer(true);
    return array;
  }();
  return probe->is_tracer();
}

NB_MODULE(_bridge, m) {
  nb::module_::import_("mlx.core"); /* registers the types of arrays, streams and groups */
  load_collector();

#ifdef __clang__
  m.attr("compiler") = __VERSION__; /* begins with its name */
#else
  m.attr("compiler") = "GCC " __VERSION__;
#endif
  m.attr("nanobind") = std::to_string(NB_VERSION_MAJOR) + "." + std::to_string(NB_VERSION_MINOR) + "." +
                       std::to_string(NB_VERSION_PATCH);

  m.def(
      "set_error_factory", [](nb::callable make_error) { set_error_factory(make_error.release().ptr()); },
      "make_error"_a, "make_error(status, text) returns the exception to raise for an error of the engine.");
  m.def(
      "operation_failed",
      [] {
        return reinterpret_cast<uintptr_t>(+[](int status, const char* text, int raises) {
          Error error(status, text);
          note_failure(error);
          if (raises) raise_async(error);
        });
      },
      "Address of void operation_failed(int status, const char *text, int raises), for the thread of MLX in which an "
      "operation has failed: what MLX computes from it is never read, and the error raised soon if `raises`.");

  m.def("watch_exits", &watch_exits, "From now on, in the main thread, exit_status() is known.");
  m.def("exit_status", &exit_status, "The status of the SystemExit that has ended the program; None while none has.");
  m.def(
      "raise_mlx_error", [](const std::string& text) { throw std::runtime_error(text); }, "text"_a,
      "Raises what an exception of MLX with this text becomes: for tests, where no GPU times out.");
  m.def(
      "label_streams", &label_streams, "label_thread"_a,
      "Calls `label_thread`, the address of void (*)(uint64_t, bool), in the thread of each CPU stream that there is: "
      "with its label, and whether it is the default stream of this thread, which messages may use.");
  m.def(
      "one_stream", &one_stream, "group"_a.none(), "way"_a, "stream"_a.none(), "label_thread"_a,
      "The CPU stream that this thread's operations of a group and a way have: that of the first one, or for messages "
      "(ways from 0) of the thread that has called label_streams, the default stream then. It is labeled as the first "
      "stream that this function has returned, or the second.");
  m.def("wait_for_cpu_streams", &wait_for_cpu_streams,
        "Returns when the CPU streams of MLX, of all threads, have done what they have to do now.");
  m.def("busy_streams", &busy_streams, "How many streams of MLX have operations of groups to carry out.");
  m.def(
      "queued_tasks",
      [] {
        nb::list tasks;
        for (const auto& task : queued_tasks())
          tasks.append(
              nb::make_tuple(task.group, task.to, task.from, task.place, task.send, task.receive, task.thread));
        return tasks;
      },
      "(group, to, from, place, send, receive, thread) of each operation that its stream of MLX has not come to; thread "
      "carries out the one that the stream is in, 0 where it is in none.");
  m.def("traces", &traces, "Whether this thread runs a function to differentiate, compile, vectorize or export it.");
  m.def("set_own_directories", &set_own_directories, "mlxdist"_a, "mlx"_a,
        "Frames of files in these directories, whose names end with a slash, are not the program's.");
  m.def("is_own", &is_own, "group"_a, "Whether a group of MLX is one of mlxdist, and of no backend of MLX.");
  m.def(
      "is_traced", [](const mx::array& array) { return array.is_tracer(); }, "array"_a,
      "Whether MLX records what is computed from the array, for a gradient or for mx.compile.");
  m.def("uninitialized", &uninitialized, "shape"_a, "dtype"_a,
        "An array whose memory has no values yet: the caller writes all of it, before it is used.");
  m.def("is_zeros", &is_zeros, "array"_a,
        "Whether an array is the zeros that MLX makes of what has no gradient, or a sum of such.");
  m.def(
      "fill_call",
      [](uintptr_t address, double timeout, uint64_t label) {
        auto* call = reinterpret_cast<mlxdist_call*>(address);
        call->timeout = timeout;
        call->call_site = current_call_site().exact;
        call->label = label;
      },
      "address"_a, "timeout"_a, "label"_a,
      "Fills in a mlxdist_call: it comes from the line of the program that has called mlxdist.");
  m.def(
      "call_site_of",
      [](nb::handle frame) { return call_site_of(reinterpret_cast<PyFrameObject*>(frame.ptr())).exact; }, "frame"_a,
      "The line of the program that a frame belongs to (\"train.py:88\"), or \"\".");

  nb::class_<Connection>(m, "Connection")
      .def_prop_ro("rank", &Connection::rank)
      .def_prop_ro("size", &Connection::size)
      .def_prop_ro("group", [](const Connection& c) { return reinterpret_cast<uintptr_t>(c.group()); })
      .def(
          "mlx_group",
          [](std::shared_ptr<Connection> connection, double timeout, int64_t structure, uint64_t label) {
            return mx::distributed::Group(std::make_shared<Group>(std::move(connection), timeout, structure, label));
          },
          "timeout"_a = -1.0, "structure"_a = 0, "label"_a = 0,
          "structure: of less than 63 bits, which must be equal on all ranks of an all_sum, all_max or all_min. label: "
          "mlxdist_label, of all its operations.")
      .def("split", &Connection::split, "color"_a, "key"_a, "label"_a = 0)
      .def_prop_ro("error_reported", &Connection::error_reported)
      .def_prop_ro("is_busy", &Connection::is_busy)
      .def("defer_errors", &Connection::defer_errors)
      .def("drain", &Connection::drain, "seconds"_a)
      .def("close", &Connection::close);

  m.def("connect", &connect, "group"_a, "Makes the engine's group (its address; 0: a group of one) usable by MLX.");
  define_operations(m);
  m.def("time_stamp", &time_stamp, "inputs"_a, "stream"_a = nb::none(),
        "When the inputs are computed: nanoseconds of a monotonic clock, an array of shape ().");
  m.def("expert_matmul", &expert_matmul, "rows"_a, "weights"_a, "experts"_a,
        "(tokens, k, out): the matrices (experts, out, in) of this rank's experts by rows (tokens, k or 1, in), zeros "
        "for others; float32, on the CPU.");
}

}  // namespace mlxdist
