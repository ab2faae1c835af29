#include "frames.h"

#include "debug.h"
#include "device.h"
#include "error.h"

uint32_t frames_of_slot(const struct device *device, uint32_t slot_bytes) {
  return device->whole_frames ? slot_bytes / FRAME_BYTES : 1;
}

/* Two windows of messages can be in a send queue: see queue_pair.c. */
static int check(const mlxdist_options *options, const struct device *device) {
  uint32_t frames = 2 * options->bulk_slots * frames_of_slot(device, options->bulk_slot_bytes);
  if (!device->whole_frames || frames <= device->max_frames) return MLXDIST_OK;
  return fail(MLXDIST_INVALID_ARGUMENT,
              "%u bulk slots of %u bytes need %u frames in a queue, and device %s has %u; "
              "lower MLXDIST_BULK_SLOTS or MLXDIST_BULK_SLOT_BYTES",
              options->bulk_slots, options->bulk_slot_bytes, frames, device->name, device->max_frames);
}

/* The largest message that a device takes. What was found with peers counts, whatever the port says: Apple's says too
 * much or, by a rule for its version (verbs/apple.c), perhaps too little. A probe tries no more than this much. */
static uint32_t largest_message(const mlxdist_options *options, const struct device *device) {
  uint32_t found = options->largest_message, said = device->port.max_msg_sz;
  if (!found || (found == MLXDIST_PEER_PROBE_BYTES && said > found)) return said;
  return found;
}

int frames_fit_slots(mlxdist_options *options, const struct device *devices, uint32_t count) {
  uint32_t slot = options->bulk_slot_bytes, asked = slot;
  for (uint32_t i = 0; i < count; i++) {
    uint32_t largest = largest_message(options, &devices[i]), most = largest / FRAME_BYTES * FRAME_BYTES;
    if (most < FRAME_BYTES)
      return fail(MLXDIST_RESOURCES, "device %s takes messages of %u bytes, and the least is %u", devices[i].name,
                  largest, FRAME_BYTES);
    if (most < slot) slot = most;
  }
  options->bulk_slots *= asked / slot;
  options->bulk_slot_bytes = slot;
  if (slot != asked)
    debug(DEBUG_INFO, "connection", "%u bulk slots of %u bytes: the device takes no larger messages",
          options->bulk_slots, slot);
  int status = MLXDIST_OK;
  for (uint32_t i = 0; i < count && !status; i++) status = check(options, &devices[i]);
  return status;
}
