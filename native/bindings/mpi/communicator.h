/* The engine's groups as MPI communicators, and how errors leave. */
#pragma once

#include <functional>

#include "../error.h"
#include "open_mpi.h"

namespace mlxdist {

/* The engine's group stays with MLX's communicator until MLX has freed it and nothing can still use it; the struct
 * itself stays for ever, because MLX frees a communicator while operations on it may still wait in a stream. */
struct Communicator {
  mlxdist_group* group; /* null before MPI_Init, and when the world has ended */
  int rank;
  int size;
  int running; /* operations */
  bool freed;
};

/* The bridge sees to it that what MLX computes from the operation is never read (bindings/mlx/failed_arrays.h) and, if
 * `raises`, tells Python of the error at once, for readers that swallow it (bindings/mlx/errors.h). */
using OperationFailed = void(int status, const char* text, int raises);

/* Makes ompi_mpi_comm_world the stream lane of the engine's `world`. A second call does nothing. */
void open_world(mlxdist_group* world, OperationFailed* operation_failed);

/* True once open_world has been called, in this process or the one that it was forked from. */
bool world_is_open();

/* What mlxdist.finalize() calls, as mlxdist/runtime/mpi_shim.py declares it. */
struct Shim {
  /* Waits until nothing runs; 0 if that took longer than `seconds`. Errors until close() are for finalize() to ask for.
   */
  int (*drain)(double seconds);
  /* Waits for running operations, refuses later ones and destroys the engine's groups, but for the world's. */
  void (*close)();
  int (*error_reported)(); /* 1 once an error has been thrown into MLX, which raises it where an array is evaluated */
  int (*is_busy)();        /* 1 while an operation runs */
  /* In the thread of a stream: collectives in it have this label from now on, and with `messages` it may send and
   * receive: what does so in this stream is evaluated in the order of the program. */
  void (*label_thread)(uint64_t label, bool messages);
};
extern const Shim shim;

/* Adds a communicator for `group`. */
MPI_Comm add_communicator(mlxdist_group* group);

/* MLX will not use `comm` again, but operations of it may still wait. */
void free_communicator(MPI_Comm comm);

/* Destroys the groups of freed communicators on which nothing runs. */
void destroy_freed();

/* For a collective in this thread. Its label is the stream; throws if that has none. */
mlxdist_call collective_call();

/* For a message in this thread, by the name of MLX's function: throws if the thread's stream may have none. */
void check_message(const char* name);

/* Runs `operation`, which returns a mlxdist_status or throws an Error, on the group of `comm`. Throws what goes wrong,
 * and raises it soon. */
void run(MPI_Comm comm, const std::function<int(mlxdist_group*)>& operation);

}  // namespace mlxdist
