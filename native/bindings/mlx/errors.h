/*
 * How an error of the engine gets from a thread of MLX to Python.
 *
 * MLX keeps the text of an exception in one of its threads and throws it again, as std::runtime_error, where an
 * array is evaluated. The status therefore leads the text ("[mlxdist 3] ..."), and a translator in nanobind's
 * domain `mlx`, which mlx.core shares, turns it into the class of mlxdist.base.errors.
 *
 * One reader swallows it: numpy.array(x) asks x for its buffer, which evaluates x; it takes every error for "has
 * no buffer", tries again in another way, and then reads an array that was never written. So the first error
 * is also handed to the interpreter, which raises it in the main thread at its next step, unless the translator
 * has raised it by then. Later operations of a failed group are refused before they run, again at each attempt.
 */
#pragma once

#include "../error.h"

namespace mlxdist {

/* Raises the text of an Error in the main thread, unless it is raised by an evaluation before. Any thread. */
void raise_async(const Error& error);

/* For another world, with the interpreter's lock: only arrays of the one before raise its errors from now on. */
void forget_errors();

/* `make_error(status, text)` returns the exception to raise. `make_error` is a Python object, kept for ever. */
void set_error_factory(void* make_error);

}  // namespace mlxdist
