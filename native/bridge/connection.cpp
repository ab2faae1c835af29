#include "connection.h"

#include <chrono>

#include <unistd.h>

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

mlxdist_layout layout_of(const mx::array& x) {
  mlxdist_layout layout{};
  constexpr int most = static_cast<int>(std::size(layout.shape));
  layout.dtype = dtype_of(x.dtype());
  int ndim = static_cast<int>(x.ndim());
  layout.ndim = std::min(ndim, most);
  for (int i = 0; i < ndim; i++) {
    if (i < most) {
      layout.shape[i] = x.shape(i);
    } else {
      layout.shape[most - 1] *= x.shape(i);
    }
  }
  return layout;
}

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

Connection::Connection(mlxdist_group* group, int rank, int size)
    : group_(group), rank_(rank), size_(size), process_(getpid()) {}

void Connection::enqueue(std::shared_ptr<Connection> connection, mx::Stream stream, Operation operation) {
  connection->check();
  auto ticket = std::make_shared<Ticket>(std::move(connection)); /* std::function wants tasks that copy */
  mx::cpu::get_command_encoder(stream).dispatch(
      [ticket = std::move(ticket), operation = std::move(operation)] { (**ticket).run(operation); });
}

void Connection::check() {
  std::shared_lock lock(closing_);
  auto* group = usable();
  int status = mlxdist_group_error(group);
  if (status != MLXDIST_OK) throw Error(status, mlxdist_last_error());
}

mlxdist_group* Connection::usable() const {
  if (getpid() != process_) {
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

void Connection::run(const Operation& operation) {
  std::shared_lock lock(closing_);
  int status = operation(usable());
  if (status == MLXDIST_OK) return;
  Error error(status, mlxdist_last_error());
  if (reports_errors_.exchange(false)) raise_soon(error);
  throw error;
}

bool Connection::drain(double seconds) {
  reports_errors_ = false;
  std::unique_lock lock(pending_mutex_);
  return drained_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return pending_ == 0; });
}

void Connection::close() {
  std::unique_lock lock(closing_);
  group_ = nullptr;
}

} // namespace mlxdist
