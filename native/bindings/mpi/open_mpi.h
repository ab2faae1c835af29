/*
 * The part of Open MPI's C ABI that MLX uses. MLX opens the library that MLX_MPI_LIBNAME names and looks the names
 * below up in it; one that is missing makes the backend silently unavailable. `mlxdist launch` checks them before it
 * starts a rank (mlxdist/runtime/mpi_shim.py has the list).
 *
 * A handle is an opaque pointer. Those of the predefined objects are the addresses of data symbols, whose layout is
 * therefore ours to choose. MLX ignores the results of all functions but MPI_Init and MPI_Comm_split, so an error is
 * an exception that passes through MLX to Python.
 */
#pragma once

#include <cstddef>
#include <cstdint>

namespace mlxdist {
struct Communicator;

struct Datatype {
  int32_t dtype; /* mlxdist_dtype */
};

struct Op {
  int32_t op;    /* mlxdist_op */
  int32_t dtype; /* the only mlxdist_dtype it is for, or any_dtype */
};

constexpr int32_t any_dtype = -1;
}  // namespace mlxdist

#pragma GCC visibility push(default)

extern "C" {

using MPI_Comm = mlxdist::Communicator*;
using MPI_Datatype = const mlxdist::Datatype*;
using MPI_Op = const mlxdist::Op*;
using MPI_User_function = void(void* in, void* inout, int* count, MPI_Datatype* type);

struct MPI_Status {
  int source;
  int tag;
  int error;
  int cancelled;
  size_t count;
};

enum { MPI_SUCCESS = 0, MPI_ERR_OTHER = 16, MPI_ANY_TAG = -1 };

#define MPI_IN_PLACE (reinterpret_cast<const void*>(1))

int MPI_Get_library_version(char* version, int* length);
int MPI_Init(int* argc, char*** argv);
int MPI_Finalize();

int MPI_Comm_rank(MPI_Comm comm, int* rank);
int MPI_Comm_size(MPI_Comm comm, int* size);
int MPI_Comm_split(MPI_Comm comm, int color, int key, MPI_Comm* result);
int MPI_Comm_free(MPI_Comm* comm);

int MPI_Allreduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm);
int MPI_Allgather(const void* in, int in_count, MPI_Datatype in_type, void* out, int out_count, MPI_Datatype out_type,
                  MPI_Comm comm);
int MPI_Send(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm);
int MPI_Recv(void* data, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Status* status);

int MPI_Type_contiguous(int count, MPI_Datatype of, MPI_Datatype* result);
int MPI_Type_commit(MPI_Datatype* type);
int MPI_Op_create(MPI_User_function* function, int commutes, MPI_Op* result);

extern mlxdist::Communicator ompi_mpi_comm_world;

extern const mlxdist::Op ompi_mpi_op_sum, ompi_mpi_op_max, ompi_mpi_op_min;

extern const mlxdist::Datatype ompi_mpi_c_bool, ompi_mpi_int8_t, ompi_mpi_uint8_t, ompi_mpi_int16_t, ompi_mpi_uint16_t,
    ompi_mpi_int32_t, ompi_mpi_uint32_t, ompi_mpi_int64_t, ompi_mpi_uint64_t, ompi_mpi_float, ompi_mpi_double,
    ompi_mpi_c_complex;

}  // extern "C"

#pragma GCC visibility pop
