/* Where in the program an operation comes from: "train.py:88", for the flight recorder. */
#pragma once

#include <Python.h>

namespace mlxdist {

/* Texts that are never freed. `near` is for operations that were built later than the call. */
struct CallSite {
  const char* exact = ""; /* "train.py:88" */
  const char* near = "";  /* "near train.py:88" */
};

/* The directories, with a slash at the end, of the packages whose frames are skipped. */
void set_own_directories(const char* mlxdist, const char* mlx);

/* The line of the innermost frame, from `frame` outward, that is neither mlxdist's nor MLX's. Empty if there is none.
 * With the GIL. */
CallSite call_site_of(PyFrameObject* frame);

/* That of this thread's current frame; empty without the GIL, which MLX releases to evaluate. */
CallSite current_call_site();

/* MLX's own operations carry no call site, so each thread keeps its last one. note_call_site() looks it up again after
 * 20 us or more: a lookup takes a twentieth of a small operation. */
void note_call_site();
CallSite noted_call_site();

}  // namespace mlxdist
