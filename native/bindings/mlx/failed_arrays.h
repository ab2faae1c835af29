/*
 * What MLX computes from an operation that has failed is never read.
 *
 * MLX throws the error of a stream once. Afterwards the result of the operation, and what MLX's own primitives have
 * computed from it in the same graph, count as evaluated: they would be read without an error. MLX has dropped the
 * graph by then and does not say which arrays those are. So when the error reaches Python, all arrays that MLX has
 * computed become arrays whose evaluation raises that error, at every attempt and for all that is computed from them.
 * That takes with it what was right before; nothing wrong is left. Arrays made from memory are as they were, and so are
 * those that MLX has found to be done when they were read again; what is computed from them can be computed.
 *
 * Why not otherwise:
 * - The failed array alone does not keep the error: what follows it has been computed as well.
 * - Streams or events that keep the error: arrays of mx.eval have no event, and MLX's main thread is thrown the error
 *   of a stream in the middle of another evaluation, whose arrays then count as evaluated, or are waited for for ever.
 * - Arrays that never become available: a reader would wait for ever, and MLX marks what follows by itself.
 * - To refuse every later evaluation in a failed world: an array that has been evaluated is read without one.
 * - NaN in the result: integers and comparisons show none.
 * - To wait for each operation while a graph is evaluated, so that nothing follows it: costs what asynchronous
 *   evaluation gains, in each operation that succeeds.
 */
#pragma once

#include "errors.h"

namespace mlxdist {

/* When the module is loaded. An import in fail_arrays() would run Python code, and in it the handlers of signals, whose
 * exceptions would come out of the import. */
void load_collector();

/* In the thread that carries out an operation: it has failed, so its result has not been written. */
void note_failure(const Error& error);

/* Before the error is raised in Python, with the interpreter's lock: the arrays of the program fail, if an operation
 * has failed since the last time. */
void fail_arrays();

/* For another world: as fail_arrays(), and the streams of MLX forget the errors that they have not thrown yet. */
void forget_failures();

}  // namespace mlxdist
