#include "connection.h"

#include <atomic>
#include <utility>

#include <sys/types.h>
#include <unistd.h>

#include "interpreter.h"
#include "line.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlxdist {

namespace mx = mlx::core;

static mlxdist_dtype dtype_of(mx::Dtype dtype) {
  switch (dtype.val()) {
    case mx::Dtype::Val::bool_:
      return MLXDIST_BOOL;
    case mx::Dtype::Val::uint8:
      return MLXDIST_UINT8;
    case mx::Dtype::Val::uint16:
      return MLXDIST_UINT16;
    case mx::Dtype::Val::uint32:
      return MLXDIST_UINT32;
    case mx::Dtype::Val::uint64:
      return MLXDIST_UINT64;
    case mx::Dtype::Val::int8:
      return MLXDIST_INT8;
    case mx::Dtype::Val::int16:
      return MLXDIST_INT16;
    case mx::Dtype::Val::int32:
      return MLXDIST_INT32;
    case mx::Dtype::Val::int64:
      return MLXDIST_INT64;
    case mx::Dtype::Val::float16:
      return MLXDIST_FLOAT16;
    case mx::Dtype::Val::float32:
      return MLXDIST_FLOAT32;
    case mx::Dtype::Val::float64:
      return MLXDIST_FLOAT64;
    case mx::Dtype::Val::bfloat16:
      return MLXDIST_BFLOAT16;
    case mx::Dtype::Val::complex64:
      return MLXDIST_COMPLEX64;
  }
  throw Error(MLXDIST_INVALID_ARGUMENT, "this MLX has a dtype that mlxdist does not know");
}

/* That of the dimensions from `first` on. */
static mlxdist_layout layout_from(const mx::array& x, int first) {
  mlxdist_layout layout{};
  constexpr int most = static_cast<int>(std::size(layout.shape));
  layout.dtype = dtype_of(x.dtype());
  int ndim = static_cast<int>(x.ndim()) - first;
  layout.ndim = std::min(ndim, most);
  for (int i = 0; i < ndim; i++) {
    if (i < most) {
      layout.shape[i] = x.shape(first + i);
    } else {
      layout.shape[most - 1] *= x.shape(first + i);
    }
  }
  return layout;
}

mlxdist_layout layout_of(const mx::array& x) { return layout_from(x, 0); }

mlxdist_layout row_layout_of(const mx::array& x) { return layout_from(x, 1); }

char* data_of(const mx::array& x) {
  auto* data = const_cast<char*>(x.data<char>());
  if (reinterpret_cast<uintptr_t>(data) % x.itemsize() != 0) {
    throw Error(MLXDIST_INVALID_ARGUMENT,
                "an array begins in the middle of an element, because it is a view of a slice of another dtype: pass a "
                "copy of it, such as x + 0");
  }
  return data;
}

/* One enqueued operation, from enqueue until its task is gone, whether it ran or not. */
class Connection::Ticket {
 public:
  explicit Ticket(std::shared_ptr<Connection> connection) : connection_(std::move(connection)) {
    std::lock_guard lock(connection_->pending_mutex_);
    connection_->pending_++;
  }
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;
  ~Ticket() {
    std::lock_guard lock(connection_->pending_mutex_);
    if (--connection_->pending_ == 0) connection_->drained_.notify_all();
  }
  Connection& operator*() const { return *connection_; }

 private:
  std::shared_ptr<Connection> connection_;
};

struct Connection::World {
  const pid_t process = getpid(); /* queue pairs do not survive a fork */
  std::atomic<bool> reports_errors = true; /* until the first error, or until finalize() looks for itself */
  std::atomic<bool> told_error = false;
  std::mutex mutex;
  std::vector<std::weak_ptr<Connection>> split_off;
};

Connection::Connection(mlxdist_group* group, int rank, int size)
    : group_(group), rank_(rank), size_(size), is_world_(true), world_(std::make_shared<World>()) {}

Connection::Connection(mlxdist_group* group, std::shared_ptr<World> world)
    : group_(group),
      rank_(group ? mlxdist_group_rank(group) : 0),
      size_(group ? mlxdist_group_size(group) : 1),
      is_world_(false),
      world_(std::move(world)) {}

Connection::~Connection() {
  if (!is_world_) close();
}

std::shared_ptr<Connection> Connection::split(const std::shared_ptr<Connection>& connection, int color, int key) {
  mlxdist_set_place(current_line().at);
  InterpreterRuns others_run;
  mlxdist_group* part = nullptr;
  if (connection->size_ > 1) {
    std::shared_lock lock(connection->closing_);
    int status = mlxdist_group_split(connection->usable(), color, key < 0 ? connection->rank_ : key, &part);
    if (status != MLXDIST_OK) throw Error(status, mlxdist_last_error());
  }
  if (color < 0) return nullptr;
  std::shared_ptr<Connection> result(new Connection(part, connection->world_));
  std::lock_guard lock(connection->world_->mutex);
  std::erase_if(connection->world_->split_off, [](const auto& group) { return group.expired(); });
  connection->world_->split_off.push_back(result);
  return result;
}

void Connection::enqueue(std::shared_ptr<Connection> connection, mx::Stream stream, Call call,
                         Operation operation) {
  connection->check();
  auto ticket = std::make_shared<Ticket>(std::move(connection)); /* std::function wants tasks that copy */
  mx::cpu::get_command_encoder(stream).dispatch(
      [ticket = std::move(ticket), call, operation = std::move(operation)] { (**ticket).run(call, operation); });
}

void Connection::check() {
  std::shared_lock lock(closing_);
  auto* group = usable();
  int status = mlxdist_group_error(group);
  if (status == MLXDIST_OK) return;
  world_->told_error = true;
  throw Error(status, mlxdist_last_error());
}

mlxdist_group* Connection::usable() const {
  if (getpid() != world_->process) {
    throw Error(MLXDIST_INVALID_ARGUMENT,
                "this process was forked from a rank, and a group does not survive a fork: use it in the process that "
                "called mlxdist.init(), or start the child with subprocess or multiprocessing's spawn");
  }
  if (group_ == nullptr) {
    throw Error(MLXDIST_INVALID_ARGUMENT,
                "the group has been finalized: evaluate arrays that need it (mx.eval) before finalize()");
  }
  return group_;
}

void Connection::run(Call call, const Operation& operation) {
  std::shared_lock lock(closing_);
  auto* group = usable();
  mlxdist_set_place(call.place);
  if (call.timeout >= 0) mlxdist_set_timeout(call.timeout);
  int status = operation(group);
  if (call.timeout >= 0) mlxdist_set_timeout(-1);
  if (status == MLXDIST_OK) return;
  Error error(status, mlxdist_last_error());
  world_->told_error = true;
  if (world_->reports_errors.exchange(false)) raise_soon(error);
  throw error;
}

bool Connection::told_error() const { return world_->told_error; }

/* Those split off before the world. */
std::vector<std::shared_ptr<Connection>> Connection::groups_to_end() {
  std::vector<std::shared_ptr<Connection>> groups;
  if (!is_world_) return groups;
  std::lock_guard lock(world_->mutex);
  for (const auto& group : world_->split_off) {
    if (auto alive = group.lock()) groups.push_back(std::move(alive));
  }
  return groups;
}

bool Connection::is_idle_until(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(pending_mutex_);
  return drained_.wait_until(lock, deadline, [this] { return pending_ == 0; });
}

void Connection::keep_errors() { world_->reports_errors = false; }

bool Connection::is_busy() {
  auto now = std::chrono::steady_clock::now();
  for (const auto& group : groups_to_end()) {
    if (!group->is_idle_until(now)) return true;
  }
  return !is_idle_until(now);
}

bool Connection::drain(double seconds) {
  InterpreterRuns others_run;
  auto wait = std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
  auto deadline = std::chrono::steady_clock::now() + wait;
  if (is_world_) keep_errors();
  bool idle = true;
  for (const auto& group : groups_to_end()) idle = group->is_idle_until(deadline) && idle;
  return is_idle_until(deadline) && idle;
}

void Connection::close() {
  InterpreterRuns others_run;
  for (const auto& group : groups_to_end()) group->close();
  std::unique_lock lock(closing_);
  auto* group = std::exchange(group_, nullptr);
  if (!is_world_ && group != nullptr && getpid() == world_->process) mlxdist_group_destroy(group);
}

} // namespace mlxdist
