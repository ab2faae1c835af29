/* The devices that the provider can play: see device_profile.h. */
#include "device_profile.h"

#include "../soft.h"

#include <errno.h>

/* Apple's technote TN3205 and what MLX's JACCL, llama.cpp and ds4 have found out. A region that is registered after
 * INIT to RTR is never mapped; after a move to ERR every unmap of a region fails, so this refuses the move. A region
 * across 4 GiB corrupts data silently there, opening a device twice hangs, and a peer that is not at the other end of
 * the cable is not found: here these are errors. Messages of more than one frame came with macOS 26.3. Of 256 entries
 * asked for 1023 were given, and 63 messages of 16 frames fit in.
 *
 * Where sources disagree on what is accepted (access flags of regions, path MTU), one profile plays each answer. */
#define ALL_ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE)
#define APPLE(label, ...)                                                                                              \
  {.name = label,                                                                                                      \
   .devices = SOFT_DEVICES,                                                                                            \
   .max_wr = 4095,                                                                                                     \
   .max_send_sge = 1,                                                                                                  \
   .max_pd = 11,                                                                                                       \
   .max_cq = 11,                                                                                                       \
   .max_cqe = SOFT_MAX_CQE,                                                                                            \
   .max_mr = 100,                                                                                                      \
   .min_wr = 1023,                                                                                                     \
   .mr_alignment = SEGMENT_PAGE,                                                                                       \
   .active_mtu = IBV_MTU_4096,                                                                                         \
   .frames = true,                                                                                                     \
   .rnr_wait = true,                                                                                                   \
   .single_peer = true,                                                                                                \
   .strict_order = true,                                                                                               \
   .short_regions = true,                                                                                              \
   __VA_ARGS__}
/* As much as this provider has room for. */
#define UNRESTRICTED(label, ...)                                                                                       \
  {.name = label,                                                                                                      \
   .devices = 4,                                                                                                       \
   .max_qp = SOFT_MAX_QP,                                                                                              \
   .max_wr = SOFT_MAX_WR,                                                                                              \
   .max_send_sge = SOFT_MAX_SEND_SGE,                                                                                  \
   .max_pd = SOFT_MAX_PD,                                                                                              \
   .max_cq = SOFT_MAX_CQ,                                                                                              \
   .max_mr = SOFT_MAX_MR,                                                                                              \
   .mr_alignment = 1,                                                                                                  \
   .path_mtu = IBV_MTU_4096,                                                                                           \
   .immediate = true,                                                                                                  \
   .writes = true,                                                                                                     \
   .early_receives = true,                                                                                             \
   .late_regions = true,                                                                                               \
   .goes_to_err = true,                                                                                                \
   __VA_ARGS__}
#define MOST_FRAMES (4095 * SOFT_FRAME_BYTES)

const struct soft_profile soft_profiles[SOFT_PROFILES] = {
    [SOFT_IDEAL] =
        UNRESTRICTED("ideal", .max_cqe = SOFT_MAX_CQE, .max_message = SOFT_MAX_MESSAGE, .active_mtu = IBV_MTU_4096),
    [SOFT_APPLE_TB5] =
        APPLE("apple-tb5", .max_qp = 10, .shares_qp = true, .max_message = MOST_FRAMES, .path_mtu = IBV_MTU_4096),
    [SOFT_APPLE_TB5_26_2] = APPLE("apple-tb5-26.2", .max_qp = 10, .shares_qp = true, .max_message = SOFT_FRAME_BYTES,
                                  .path_mtu = IBV_MTU_1024, .region_access = ALL_ACCESS, .access_error = EINVAL),
    /* As MCDMA measured two M3 Ultras with macOS 27.0. TN3205 and JACCL have larger receives. */
    [SOFT_APPLE_TB5_27] =
        APPLE("apple-tb5-27", .max_message = MOST_FRAMES, .path_mtu = IBV_MTU_4096, .packets = true, .domain_gid = true,
              .max_mr_size = 0xfa0000, .region_access = IBV_ACCESS_LOCAL_WRITE, .access_error = EINVAL, .max_qp = 3),
    /* JACCL, llama.cpp and ds4 run on Thunderbolt. They pass all access flags, signal every SEND, and read neither
     * byte_len nor how deep a queue is, so nothing says that anything else works there. */
    [SOFT_APPLE_ODD] = APPLE("apple-odd", .max_qp = 10, .shares_qp = true, .max_message = MOST_FRAMES,
                             .path_mtu = IBV_MTU_4096, .region_access = ALL_ACCESS, .queue_pair_access = ALL_ACCESS,
                             .no_length = true, .no_depth = true, .signaled_only = true, .leaks_domains = true),
    /* Linux, drivers/infiniband/sw/rxe: rxe_param.h allows more queue pairs, regions and entries than there is room for
     * here; rxe_resp.c drops what is too long for a receive of UC. */
    [SOFT_RXE] = UNRESTRICTED("rxe", .max_cqe = 1 << 15, .max_message = 8 << 20, .active_mtu = IBV_MTU_1024,
                              .drops_too_long = true),
};
