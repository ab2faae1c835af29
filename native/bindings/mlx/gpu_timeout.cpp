#include "gpu_timeout.h"

#include "connection.h"

namespace mlxdist {

std::optional<Error> explain_gpu_timeout(const std::string& what) {
  constexpr const char* texts[] = {"kIOGPUCommandBufferCallbackErrorTimeout", "Caused GPU Timeout Error"};
  bool is_timeout = false;
  for (const auto* text : texts) is_timeout |= what.find(text) != std::string::npos;
  auto world = is_timeout ? Connection::world() : nullptr;
  return world ? world->explain_gpu_timeout() : std::nullopt;
}

}  // namespace mlxdist
