/* Where in the program an operation comes from: "train.py:88", for the flight recorder. */
#pragma once

#include <Python.h>

namespace mlxdist {

/* Texts that stay for ever. `near` is for what was not built there, but later. */
struct Line {
  const char* at = "";   /* "train.py:88" */
  const char* near = ""; /* "near train.py:88" */
};

/* The folders, with a slash at the end, of the packages whose frames are passed over. */
void set_own_folders(const char* mlxdist, const char* mlx);

/* The line of a frame, or of one that called it: the first that is neither mlxdist's nor MLX's. Empty if there is none.
 * With the interpreter's lock. */
Line line_of(PyFrameObject* frame);

/* That of the program which calls this thread; empty without the interpreter's lock: MLX lets go of it to evaluate. */
Line current_line();

/* MLX's own operations do not carry their line, so a thread keeps the one that it has come to. note_line() looks for it
 * where the last time is 20 us ago or more: a look takes as long as a twentieth of a small operation. */
void note_line();
Line noted_line();

}  // namespace mlxdist
