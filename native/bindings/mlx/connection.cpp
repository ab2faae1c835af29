#include "connection.h"

#include <atomic>
#include <thread>
#include <utility>

#include <dlfcn.h>

#include "failed_arrays.h"
#include "gil.h"
#include "call_site.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/scheduler.h"
#include "stream_task.h"

#ifdef __APPLE__
/* From mlx/backend/metal/device.h, which needs the frameworks of the SDK: what libmlx.dylib exports of it. */
namespace mlx::core::metal {
class CommandEncoder {
 public:
  void end_encoding(bool wait_in_flight);
  void commit(std::function<void()> completion);
};
CommandEncoder& get_command_encoder(Stream s);
}  // namespace mlx::core::metal
#endif

namespace mlxdist {

namespace mx = mlx::core;

/* The engine numbers dtypes as MLX does. */
constexpr mx::Dtype::Val dtypes[] = {mx::Dtype::Val::bool_,    mx::Dtype::Val::uint8,    mx::Dtype::Val::uint16,
                                     mx::Dtype::Val::uint32,   mx::Dtype::Val::uint64,   mx::Dtype::Val::int8,
                                     mx::Dtype::Val::int16,    mx::Dtype::Val::int32,    mx::Dtype::Val::int64,
                                     mx::Dtype::Val::float16,  mx::Dtype::Val::float32,  mx::Dtype::Val::float64,
                                     mx::Dtype::Val::bfloat16, mx::Dtype::Val::complex64};
static_assert([] {
  for (int i = 0; i <= MLXDIST_COMPLEX64; i++)
    if (static_cast<int>(dtypes[i]) != i) return false;
  return true;
}());

static mlxdist_dtype dtype_of(mx::Dtype dtype) {
  if (dtype.val() <= mx::Dtype::Val::complex64) return static_cast<mlxdist_dtype>(dtype.val());
  throw Error(MLXDIST_INVALID_ARGUMENT, "this MLX has a dtype that mlxdist does not know");
}

/* That of the dimensions from `first` on. */
static mlxdist_layout layout_from(const mx::array& x, int first) {
  mlxdist_layout layout{};
  constexpr int max = static_cast<int>(std::size(layout.shape));
  layout.dtype = dtype_of(x.dtype());
  int ndim = static_cast<int>(x.ndim()) - first;
  layout.ndim = std::min(ndim, max);
  for (int i = 0; i < ndim; i++) {
    if (i < max) {
      layout.shape[i] = x.shape(first + i);
    } else {
      layout.shape[max - 1] *= x.shape(first + i);
    }
  }
  return layout;
}

mlxdist_layout layout_of(const mx::array& x) { return layout_from(x, 0); }

mlxdist_layout row_layout_of(const mx::array& x) { return layout_from(x, 1); }

Memory data_of(const mx::array& x) {
  check_alignment(reinterpret_cast<const void*>(x.offset()), x.itemsize()); /* buffers begin at multiples of 8 */
  return {x.buffer(), x.offset()};
}

static mlxdist_call call_of(const Call& from) {
  mlxdist_call call{};
  call.timeout = from.timeout;
  call.call_site = from.call_site;
  call.label = from.label;
  return call;
}

/* One enqueued operation, from enqueue until its task is gone, whether it ran or not. */
class Connection::Ticket {
 public:
  Ticket(std::shared_ptr<Connection> connection, mx::Stream stream, const Call& call, Peers peers, Operation operation)
      : connection_(std::move(connection)),
        task_(stream, connection_->id_, peers.to, peers.from),
        name_(peers.operation),
        call_(call_of(call)),
        operation_(std::move(operation)) {
    connection_->pending_++;
  }
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;
  ~Ticket() {  // NOLINT(bugprone-exception-escape): a lock that fails ends the process
    leave_void("MLX has dropped it");
    if (--connection_->pending_ > 0) return;
    std::lock_guard lock(connection_->pending_mutex_); /* a thread that has seen more than 0 waits by now */
    connection_->drained_.notify_all();
  }

  void take_place(Peers peers) {
    connection_->take_place(call_, peers);
    task_.take_place(call_);
  }

  /* It has taken its place, if it has, and will not run: peers must not wait for it. */
  void leave_void(const std::string& why) {
    if (call_.enqueued && !has_run_.exchange(true)) connection_->leave_void(name_, why);
  }

  /* Once, however often it has been dispatched. */
  void run() {
    if (has_run_.exchange(true)) return;
    task_.begin();
    try {
      connection_->run(call_, operation_);
    } catch (const Error& error) {
      note_failure(error);
      connection_->report(error);
      throw;
    }
  }

 private:
  std::shared_ptr<Connection> connection_;
  StreamTask task_;
  const char* name_;
  mlxdist_call call_;
  const Operation operation_;
  std::atomic<bool> has_run_ = false;
};

struct Connection::World {
  const OwnerProcess owner;
  std::atomic<bool> defers_errors = false; /* from the first error on, or once finalize() looks for itself */
  std::atomic<bool> error_reported = false;
  std::mutex mutex;
  std::vector<std::weak_ptr<Connection>> split_off;
};

/* Which imports mlxdist. In the main thread MLX throws a stream's error whenever it enqueues a task, in others it does
 * not. */
static const auto main_thread = std::this_thread::get_id();

/* Never destroyed: MLX's threads outlive the statics. */
static auto& current_world = *new std::weak_ptr<Connection>;

std::shared_ptr<Connection> Connection::connect(mlxdist_group* group) {
  forget_errors();
  std::shared_ptr<Connection> result(new Connection(group, true, std::make_shared<World>()));
  current_world = result;
  return result;
}

std::shared_ptr<Connection> Connection::world() { return current_world.lock(); }

Connection::Connection(mlxdist_group* group, bool is_world, std::shared_ptr<World> world)
    : group_(group),
      rank_(group ? mlxdist_group_rank(group) : 0),
      size_(group ? mlxdist_group_size(group) : 1),
      id_(group ? mlxdist_group_id(group) : 0),
      is_world_(is_world),
      world_(std::move(world)) {}

Connection::~Connection() {
  if (!is_world_) close();
}

std::shared_ptr<Connection> Connection::split(const std::shared_ptr<Connection>& connection, int color, int key,
                                              uint64_t label) {
  auto call = call_of({-1, current_call_site().exact, 0, label});
  GilRelease gil;
  mlxdist_group* part = nullptr;
  if (connection->size_ > 1) {
    auto lock = connection->keep_open();
    int status = mlxdist_group_split(connection->usable(), color, key < 0 ? connection->rank_ : key, &call, &part);
    if (status != MLXDIST_OK) {
      Error error(status, mlxdist_last_error());
      if (mlxdist_group_error(connection->group_) != MLXDIST_OK) connection->world_->error_reported = true;
      throw error;
    }
  }
  if (color < 0) return nullptr;
  std::shared_ptr<Connection> result(new Connection(part, false, connection->world_));
  std::lock_guard lock(connection->world_->mutex);
  std::erase_if(connection->world_->split_off, [](const auto& group) { return group.expired(); });
  connection->world_->split_off.push_back(result);
  return result;
}

void Connection::enqueue(std::shared_ptr<Connection> connection, mx::Stream stream, Call call, Peers peers,
                         Operation operation) {
  connection->check();
  /* Of an earlier task: before this one takes its place, if it can be. */
  if (std::this_thread::get_id() == main_thread) mx::scheduler::check_error(stream);
  auto& encoder = mx::cpu::get_command_encoder(stream);
  auto ticket = std::make_shared<Ticket>(std::move(connection), stream, call, peers, std::move(operation));
  ticket->take_place(peers);
  auto run = [ticket] { ticket->run(); }; /* small: MLX copies it several times */
  try {
    try {
      encoder.dispatch(run);
    } catch (const std::exception&) {
      /* An earlier task has failed since, and MLX has thrown its error in place of a dispatch. The peers have their
       * place for this one, so it runs; then the stream has the error again. */
      encoder.dispatch(run);
      encoder.dispatch([earlier = std::current_exception()] { std::rethrow_exception(earlier); });
    }
  } catch (const std::exception& error) {
    ticket->leave_void(error.what());
    throw;
  }
}

/* What this thread has encoded so far for its default stream of the GPU: a peer may need the result of it for an
 * operation before this one, and MLX itself would submit it only at the end of the graph. Other streams are left
 * alone: another thread may be encoding for them. This is mx::gpu::finalize, which libmlx.dylib does not export. */
static void submit_gpu_work() {
#ifdef __APPLE__
  auto stream = mx::peek_default_stream(mx::Device::gpu);
  if (!stream) return;
  /* Of libobjc, which Metal has loaded: without a pool the next command buffer would live as long as the thread. */
  auto push = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "objc_autoreleasePoolPush"));
  auto pop = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "objc_autoreleasePoolPop"));
  struct Pool {
    void (*pop)(void*);
    void* pool;
    ~Pool() { pop(pool); }
  } pool{pop, push()};
  auto& encoder = mx::metal::get_command_encoder(*stream);
  encoder.end_encoding(false);
  encoder.commit(nullptr);
#endif
}

/* Most peers are there within this time, or are late. */
constexpr double short_wait = 0.001;

/* On the evaluating thread. What goes wrong here is the error of the operation, and raised where that is: MLX leaves
 * other arrays of the graph in disorder when an exception comes out of the middle of it. */
void Connection::take_place(mlxdist_call& call, Peers peers) {
  auto lock = keep_open();
  auto* group = usable();
  if (!mlxdist_enqueue(group, &call, peers.to, peers.from)) return;
  if (mlxdist_meet(group, peers.operation, short_wait)) return;
  submit_gpu_work();
  /* A deadline of its own is that of the operation, which begins afterwards: the meeting does not outlast it. */
  double limit = call.timeout >= 0 ? call.timeout : mlxdist_group_timeout(group);
  GilRelease gil;
  mlxdist_meet(group, peers.operation, limit > 0 ? limit : -1);
}

/* Peers come to an operation that has its place here, and would wait for it: the group fails. */
void Connection::leave_void(const char* operation, const std::string& why) {
  if (is_forked()) return;
  auto lock = keep_open();
  if (group_ == nullptr || mlxdist_group_error(group_) != MLXDIST_OK) return;
  std::string text = std::string(operation) + " of rank " + std::to_string(rank_) +
                     " has its place in the order of its group, but does not run: " + why;
  mlxdist_group_abort(group_, MLXDIST_ABORTED, text.c_str());
}

void Connection::check() {
  auto lock = keep_open();
  auto* group = usable();
  int status = mlxdist_group_error(group);
  if (status == MLXDIST_OK) return;
  world_->error_reported = true;
  throw Error(status, mlxdist_last_error());
}

bool Connection::is_forked() const { return world_->owner.is_forked(); }

/* A forked child does not touch the lock: another thread of its parent may have held it. And no thread waits for it
 * with the interpreter's lock: on macOS those that want it shared wait behind close(), which waits for operations, and
 * these may wait for Python. */
std::shared_lock<std::shared_mutex> Connection::keep_open() {
  world_->owner.check("mlxdist.init");
  std::shared_lock lock(closing_, std::try_to_lock);
  if (!lock) {
    GilRelease gil;
    lock.lock();
  }
  return lock;
}

mlxdist_group* Connection::usable() const {
  if (group_ == nullptr) {
    throw Error(MLXDIST_INVALID_ARGUMENT,
                "the group has been finalized: evaluate arrays that need it (mx.eval) before finalize()");
  }
  return group_;
}

void Connection::run(mlxdist_call& call, const Operation& operation) {
  auto lock = keep_open();
  int status = operation(usable(), &call);
  if (status == MLXDIST_OK) return;
  throw Error(status, mlxdist_last_error()); /* what the engine refuses here, it refuses on all ranks */
}

void Connection::report(const Error& error) {
  world_->error_reported = true;
  if (!world_->defers_errors.exchange(true)) raise_async(error);
}

std::optional<Error> Connection::explain_gpu_timeout() {
  if (is_forked()) return std::nullopt;
  auto lock = keep_open();
  if (group_ == nullptr) return std::nullopt;
  int status = mlxdist_group_gpu_timeout(group_);
  if (status == MLXDIST_OK) return std::nullopt;
  world_->error_reported = true;
  return Error(status, mlxdist_last_error());
}

bool Connection::error_reported() const { return world_->error_reported; }

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

void Connection::defer_errors() { world_->defers_errors = true; }

bool Connection::is_busy() {
  auto now = std::chrono::steady_clock::now();
  for (const auto& group : groups_to_end()) {
    if (!group->is_idle_until(now)) return true;
  }
  return !is_idle_until(now);
}

bool Connection::drain(double seconds) {
  GilRelease gil;
  auto wait = std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
  auto deadline = std::chrono::steady_clock::now() + wait;
  if (is_world_) defer_errors();
  bool idle = true;
  for (const auto& group : groups_to_end()) idle = group->is_idle_until(deadline) && idle;
  return is_idle_until(deadline) && idle;
}

void Connection::close() {
  if (is_forked()) return;
  GilRelease gil;
  for (const auto& group : groups_to_end()) group->close();
  std::unique_lock lock(closing_);
  auto* group = std::exchange(group_, nullptr);
  if (!is_world_ && group != nullptr) mlxdist_group_destroy(group);
}

}  // namespace mlxdist
