/* Python's interpreter lock, around what waits for the engine: the bytes of a connection that another thread makes
 * meanwhile travel through Python, and would wait for the holder of that lock. */
#pragma once

#include <Python.h>

namespace mlxdist {

/* Lets go of the lock, if this thread has it, as long as it lives. */
class GilRelease {
 public:
  GilRelease() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~GilRelease() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace mlxdist
