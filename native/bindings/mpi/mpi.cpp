/* The functions of Open MPI's ABI over the engine. MLX calls those that communicate in the threads of its streams. */
#include <cstdlib>
#include <cstring>
#include <string>

#include "communicator.h"
#include "symbols.h"
#include "python.h"

using namespace mlxdist;

/* Throws if `data` is not a multiple of the element's size, which the engine needs. */
static mlxdist_layout layout_of(const void* data, int count, MPI_Datatype type) {
  check_alignment(data, mlxdist_dtype_size(type->dtype));
  mlxdist_layout layout{};
  layout.dtype = type->dtype;
  layout.ndim = 1;
  layout.shape[0] = count;
  return layout;
}

int MPI_Get_library_version(char* version, int* length) {
  /* MLX wants to read "Open MPI", and gives 256 bytes. */
  std::string text = std::string("mlxdist ") + mlxdist_version() + ", with the C ABI of Open MPI";
  memcpy(version, text.c_str(), text.size() + 1);
  *length = static_cast<int>(text.size());
  return MPI_SUCCESS;
}

int MPI_Init(int*, char***) {
  hide_symbols();
  if (world_is_open()) return MPI_SUCCESS;
  /* In a process that no launcher made one of several ranks there is nothing to join, and MLX tries its other
   * backends. All else that goes wrong throws: a code would make MLX go on as a group of one. Under mpirun and srun
   * the size is theirs to say, and the rendezvous alone tells that there is a job. */
  const char* size = getenv("MLXDIST_WORLD_SIZE");
  bool alone = size == nullptr ? getenv("MLXDIST_RENDEZVOUS") == nullptr : strcmp(size, "1") == 0;
  if (alone) return MPI_ERR_OTHER;
  auto joined = python::call("join", reinterpret_cast<uintptr_t>(&shim));
  open_world(reinterpret_cast<mlxdist_group*>(joined.first), reinterpret_cast<OperationFailed*>(joined.second));
  return MPI_SUCCESS;
}

/* MLX calls it when its statics are destroyed, after Python has ended. mlxdist.finalize() has run by then: at exit, in
 * Python, where an error can still be shown and become the exit status. */
int MPI_Finalize() { return MPI_SUCCESS; }

int MPI_Comm_rank(MPI_Comm comm, int* rank) {
  *rank = comm->rank;
  return MPI_SUCCESS;
}

int MPI_Comm_size(MPI_Comm comm, int* size) {
  *size = comm->size;
  return MPI_SUCCESS;
}

int MPI_Comm_split(MPI_Comm comm, int color, int key, MPI_Comm* result) {
  /* What MLX's stream still has to do comes first, on every rank: operations and splits must have one order. */
  python::call("wait_for_stream");
  destroy_freed();
  mlxdist_group* part = nullptr;
  {
    /* MLX keeps Python to itself meanwhile, and the thread that notices dead ranks needs it. */
    python::GilRelease gil;
    run(comm, [&](mlxdist_group* group) { return mlxdist_group_split(group, color, key, nullptr, &part); });
  }
  if (part == nullptr) {
    throw Error(MLXDIST_INVALID_ARGUMENT, "split: color " + std::to_string(color) +
                                              " is in no group, and MLX has no such result: use a color of 0 or more");
  }
  *result = add_communicator(part);
  return MPI_SUCCESS;
}

int MPI_Comm_free(MPI_Comm* comm) {
  free_communicator(*comm);
  *comm = nullptr;
  return MPI_SUCCESS;
}

int MPI_Allreduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  run(comm, [=](mlxdist_group* group) {
    if (op->dtype != any_dtype && op->dtype != type->dtype) {
      throw Error(MLXDIST_INVALID_ARGUMENT, std::string("this MLX sums ") + mlxdist_dtype_name(type->dtype) +
                                                " with its function for " + mlxdist_dtype_name(op->dtype) +
                                                ": mlxdist does not know how it names its types; use another MLX");
    }
    const void* source = in == MPI_IN_PLACE ? out : in;
    auto layout = layout_of(source, count, type);
    auto call = collective_call();
    return mlxdist_all_reduce(group, source, out, &layout, op->op, &call);
  });
  return MPI_SUCCESS;
}

int MPI_Allgather(const void* in, int in_count, MPI_Datatype in_type, void* out, int, MPI_Datatype, MPI_Comm comm) {
  run(comm, [=](mlxdist_group* group) {
    auto layout = layout_of(in, in_count, in_type);
    auto call = collective_call();
    return mlxdist_all_gather(group, in, out, &layout, &call);
  });
  return MPI_SUCCESS;
}

int MPI_Send(const void* data, int count, MPI_Datatype type, int to, int, MPI_Comm comm) {
  run(comm, [=](mlxdist_group* group) {
    auto layout = layout_of(data, count, type);
    check_message("send");
    return mlxdist_send(group, data, &layout, to, nullptr);
  });
  return MPI_SUCCESS;
}

/* Messages between two ranks are matched in order: MLX sends all with tag 0 and receives any. */
int MPI_Recv(void* data, int count, MPI_Datatype type, int from, int, MPI_Comm comm, MPI_Status* status) {
  run(comm, [=](mlxdist_group* group) {
    auto layout = layout_of(data, count, type);
    check_message("recv");
    return mlxdist_recv(group, data, &layout, from, nullptr);
  });
  *status = {from, 0, MPI_SUCCESS, 0, static_cast<size_t>(count) * mlxdist_dtype_size(type->dtype)};
  return MPI_SUCCESS;
}
