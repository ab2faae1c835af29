#include "communicator.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "python.h"

mlxdist::Communicator ompi_mpi_comm_world{};

namespace mlxdist {

/* Never destroyed: MLX's threads outlive the statics. The mutex guards all communicators, and is not held by an
 * operation that runs. */
static auto& mutex = *new std::mutex;
static auto& ended = *new std::condition_variable;
static auto& parts = *new std::vector<Communicator*>;

static std::atomic<bool> is_open;
static OwnerProcess owner; /* of the world */
static OperationFailed* operation_failed;
static std::atomic<bool> defers_errors;
static std::atomic<bool> has_reported_error = false;

void open_world(mlxdist_group* world, OperationFailed* failed) {
  std::lock_guard lock(mutex);
  if (is_open) return;
  operation_failed = failed;
  ompi_mpi_comm_world.group = mlxdist_group_stream_lane(world);
  ompi_mpi_comm_world.rank = mlxdist_group_rank(world);
  ompi_mpi_comm_world.size = mlxdist_group_size(world);
  owner = OwnerProcess();
  is_open = true;
}

bool world_is_open() { return is_open; }

static bool is_idle() {
  auto rests = [](const Communicator* comm) { return comm->running == 0; };
  return rests(&ompi_mpi_comm_world) && std::all_of(parts.begin(), parts.end(), rests);
}

static int drain_world(double seconds) {
  defers_errors = true;
  std::unique_lock lock(mutex);
  return ended.wait_for(lock, std::chrono::duration<double>(seconds), is_idle);
}

static void close_world() {
  std::vector<mlxdist_group*> groups;
  {
    std::unique_lock lock(mutex);
    ended.wait(lock, is_idle);
    for (auto* comm : parts) groups.push_back(std::exchange(comm->group, nullptr));
    parts.clear();
    ompi_mpi_comm_world.group = nullptr;
  }
  for (auto* group : groups) mlxdist_group_destroy(group);
  defers_errors = false;
}

static int error_reported() { return has_reported_error; }

static int is_busy() {
  std::lock_guard lock(mutex);
  return !is_idle();
}

/* Of the thread of a stream. */
static thread_local uint64_t label_of_thread = 0;
static thread_local bool orders_messages = false;

static void label_thread(uint64_t label, bool messages) {
  label_of_thread = label;
  orders_messages = orders_messages || messages;
}

mlxdist_call collective_call() {
  if (label_of_thread == 0) {
    throw Error(MLXDIST_INVALID_ARGUMENT,
                "a stream that is newer than mx.distributed.init() cannot be told from others in a function that was "
                "imported before: call it by its name, mx.distributed.all_sum");
  }
  mlxdist_call call{};
  call.timeout = -1;
  call.label = label_of_thread;
  return call;
}

void check_message(const char* name) {
  if (orders_messages) return;
  throw Error(MLXDIST_INVALID_ARGUMENT,
              std::string("messages of two streams have no order: ") + name +
                  " was imported before mx.distributed.init(), and is in another stream than the default one of the "
                  "thread that has called that; call it by its name, mx.distributed." +
                  name);
}

const Shim shim{drain_world, close_world, error_reported, is_busy, label_thread};

MPI_Comm add_communicator(mlxdist_group* group) {
  auto* comm = new Communicator{group, mlxdist_group_rank(group), mlxdist_group_size(group), 0, false};
  std::lock_guard lock(mutex);
  parts.push_back(comm);
  return comm;
}

void free_communicator(MPI_Comm comm) {
  if (owner.is_forked()) return; /* the mutex may be held by a thread that was not forked */
  std::lock_guard lock(mutex);
  comm->freed = true;
}

void destroy_freed() {
  std::vector<mlxdist_group*> groups;
  {
    std::lock_guard lock(mutex);
    std::erase_if(parts, [&](Communicator* comm) {
      if (!comm->freed || comm->running != 0) return false;
      groups.push_back(std::exchange(comm->group, nullptr));
      return true;
    });
  }
  for (auto* group : groups) mlxdist_group_destroy(group);
}

/* An operation that runs: the group stays while it does. */
class Operation {
 public:
  explicit Operation(Communicator* comm) : comm_(comm) {
    owner.check("mx.distributed.init");
    std::lock_guard lock(mutex);
    if (comm->group == nullptr) {
      throw Error(MLXDIST_INVALID_ARGUMENT,
                  "the group has ended: evaluate arrays that need it (mx.eval) before the program ends or lets go of "
                  "the group");
    }
    comm->running++;
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  ~Operation() {
    std::lock_guard lock(mutex);
    if (--comm_->running == 0) ended.notify_all();
  }
  mlxdist_group* group() const { return comm_->group; }

 private:
  Communicator* comm_;
};

void run(MPI_Comm comm, const std::function<int(mlxdist_group*)>& operation) {
  try {
    Operation running(comm);
    int status = operation(running.group());
    if (status != MLXDIST_OK) throw Error(status, mlxdist_last_error());
  } catch (const Error& error) {
    has_reported_error = true;
    if (python::is_running()) operation_failed(error.status, error.text(), !defers_errors);
    throw;
  }
}

}  // namespace mlxdist
