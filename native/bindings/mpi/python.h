/*
 * The interpreter that this process runs, found in memory: the library is not linked to a libpython, so one binary
 * serves every Python. Joining the world is mlxdist's own business, in Python (mlxdist/runtime/mpi_shim.py).
 */
#pragma once

#include <cstdint>

namespace mlxdist::python {

struct Result {
  uintptr_t first;
  uintptr_t second;
};

/* Calls mlxdist.runtime.mpi_shim.<function>(first, second), which returns (error text or "", first, second). Throws the
 * error text, or what kept the function from running. */
Result call(const char* function, uintptr_t first = 0, uintptr_t second = 0);

/* False when the interpreter has ended, or was never there. */
bool is_running();

/* Lets other threads of Python run while it lives, if this thread kept them from it. */
class GilRelease {
 public:
  GilRelease();
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;
  ~GilRelease();

 private:
  void* state_;
};

}  // namespace mlxdist::python
