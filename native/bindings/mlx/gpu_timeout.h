/* macOS ends GPU work that waits for about 5 s; MLX raises that with Metal's text, which names no rank. */
#pragma once

#include <optional>
#include <string>

#include "errors.h"

namespace mlxdist {

/* What to raise instead of an exception of MLX: where it is that timeout, and a rank was late for an operation, the
 * error that says which. The group has then failed with it. */
std::optional<Error> explain_gpu_timeout(const std::string& what);

}  // namespace mlxdist
