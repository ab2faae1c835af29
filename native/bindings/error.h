/* What the bindings to MLX and to MPI have in common: the engine's errors in C++, and the checks before a call. */
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include <pthread.h>

#include "mlxdist.h"

namespace mlxdist {

/* what() is "[mlxdist <status>] <text>": MLX keeps only the text of an exception, and the bridge's translator
 * (mlx/errors.h) turns it into the Python exception of that status. */
struct Error : std::runtime_error {
  Error(int status, const std::string& text)
      : std::runtime_error("[mlxdist " + std::to_string(status) + "] " + text), status(status) {}
  const char* text() const { return std::strchr(what(), ']') + 2; }
  const int status;
};

/* Forks between the process that loaded the library and this one. Each operation looks several times: getpid() is a
 * system call, and four of them took 0.8 of the 3 us of a small lazy operation. */
inline std::atomic<int> forks = [] {
  pthread_atfork(nullptr, nullptr, [] { forks++; });
  return 0;
}();

/* Of a group's process. Queue pairs do not survive a fork. */
class OwnerProcess {
 public:
  bool is_forked() const { return forks != process_; }
  /* `init`: the function that made the group. */
  void check(const std::string& init) const {
    if (!is_forked()) return;
    throw Error(MLXDIST_INVALID_ARGUMENT,
                "this process was forked from a rank, and a group does not survive a fork: use it in the process that "
                "called " +
                    init + "(), or start the child with subprocess or multiprocessing's spawn");
  }

 private:
  int process_ = forks;
};

inline void check_alignment(const void* data, uint64_t element_size) {
  if (reinterpret_cast<uintptr_t>(data) % element_size == 0) return;
  throw Error(MLXDIST_INVALID_ARGUMENT,
              "an array begins in the middle of an element, because it is a view of a slice of another dtype: pass a "
              "copy of it, such as x + 0");
}

}  // namespace mlxdist
