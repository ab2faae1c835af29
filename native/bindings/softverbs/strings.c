/* What values mean, in the words of libibverbs, which programs may compare; and static rates. */
#include "softverbs.h"

#include <stddef.h>

#define NAME(names, value) ((size_t)(value) < sizeof(names) / sizeof *(names) ? (names)[value] : "unknown")

const char *ibv_node_type_str(enum ibv_node_type type) {
  static const char *const names[] = {
      [IBV_NODE_CA] = "InfiniBand channel adapter",
      [IBV_NODE_SWITCH] = "InfiniBand switch",
      [IBV_NODE_ROUTER] = "InfiniBand router",
      [IBV_NODE_RNIC] = "iWARP NIC",
      [IBV_NODE_USNIC] = "usNIC",
      [IBV_NODE_USNIC_UDP] = "usNIC UDP",
      [IBV_NODE_UNSPECIFIED] = "unspecified",
  };
  return type == 0 ? "unknown" : NAME(names, type); /* there is none of 0 */
}

const char *ibv_port_state_str(enum ibv_port_state state) {
  static const char *const names[] = {
      [IBV_PORT_NOP] = "no state change (NOP)",
      [IBV_PORT_DOWN] = "down",
      [IBV_PORT_INIT] = "init",
      [IBV_PORT_ARMED] = "armed",
      [IBV_PORT_ACTIVE] = "active",
      [IBV_PORT_ACTIVE_DEFER] = "active defer",
  };
  return NAME(names, state);
}

const char *ibv_event_type_str(enum ibv_event_type event) {
  static const char *const names[] = {
      [IBV_EVENT_CQ_ERR] = "CQ error",
      [IBV_EVENT_QP_FATAL] = "local work queue catastrophic error",
      [IBV_EVENT_QP_REQ_ERR] = "invalid request local work queue error",
      [IBV_EVENT_QP_ACCESS_ERR] = "local access violation work queue error",
      [IBV_EVENT_COMM_EST] = "communication established",
      [IBV_EVENT_SQ_DRAINED] = "send queue drained",
      [IBV_EVENT_PATH_MIG] = "path migrated",
      [IBV_EVENT_PATH_MIG_ERR] = "path migration request error",
      [IBV_EVENT_DEVICE_FATAL] = "local catastrophic error",
      [IBV_EVENT_PORT_ACTIVE] = "port active",
      [IBV_EVENT_PORT_ERR] = "port error",
      [IBV_EVENT_LID_CHANGE] = "LID change",
      [IBV_EVENT_PKEY_CHANGE] = "P_Key change",
      [IBV_EVENT_SM_CHANGE] = "SM change",
      [IBV_EVENT_SRQ_ERR] = "SRQ catastrophic error",
      [IBV_EVENT_SRQ_LIMIT_REACHED] = "SRQ limit reached",
      [IBV_EVENT_QP_LAST_WQE_REACHED] = "last WQE reached",
      [IBV_EVENT_CLIENT_REREGISTER] = "client reregistration",
      [IBV_EVENT_GID_CHANGE] = "GID table change",
      [IBV_EVENT_WQ_FATAL] = "WQ fatal",
  };
  return NAME(names, event);
}

const char *ibv_wc_status_str(enum ibv_wc_status status) {
  static const char *const names[] = {
      [IBV_WC_SUCCESS] = "success",
      [IBV_WC_LOC_LEN_ERR] = "local length error",
      [IBV_WC_LOC_QP_OP_ERR] = "local QP operation error",
      [IBV_WC_LOC_EEC_OP_ERR] = "local EE context operation error",
      [IBV_WC_LOC_PROT_ERR] = "local protection error",
      [IBV_WC_WR_FLUSH_ERR] = "Work Request Flushed Error",
      [IBV_WC_MW_BIND_ERR] = "memory management operation error",
      [IBV_WC_BAD_RESP_ERR] = "bad response error",
      [IBV_WC_LOC_ACCESS_ERR] = "local access error",
      [IBV_WC_REM_INV_REQ_ERR] = "remote invalid request error",
      [IBV_WC_REM_ACCESS_ERR] = "remote access error",
      [IBV_WC_REM_OP_ERR] = "remote operation error",
      [IBV_WC_RETRY_EXC_ERR] = "transport retry counter exceeded",
      [IBV_WC_RNR_RETRY_EXC_ERR] = "RNR retry counter exceeded",
      [IBV_WC_LOC_RDD_VIOL_ERR] = "local RDD violation error",
      [IBV_WC_REM_INV_RD_REQ_ERR] = "remote invalid RD request",
      [IBV_WC_REM_ABORT_ERR] = "aborted error",
      [IBV_WC_INV_EECN_ERR] = "invalid EE context number",
      [IBV_WC_INV_EEC_STATE_ERR] = "invalid EE context state",
      [IBV_WC_FATAL_ERR] = "fatal error",
      [IBV_WC_RESP_TIMEOUT_ERR] = "response timeout error",
      [IBV_WC_GENERAL_ERR] = "general error",
      [IBV_WC_TM_ERR] = "TM error",
      [IBV_WC_TM_RNDV_INCOMPLETE] = "TM software rendezvous",
  };
  return NAME(names, status);
}

/* Static rates: the numbers of enum ibv_rate, as multiples of 2.5 Gbit/s and in Mbit/s. */
static const struct rate {
  int mult; /* 0: none */
  int mbps;
} rates[] = {
    [2] = {1, 2500},      [3] = {4, 10000},     [4] = {12, 30000},     [5] = {2, 5000},     [6] = {8, 20000},
    [7] = {16, 40000},    [8] = {24, 60000},    [9] = {32, 80000},     [10] = {48, 120000}, [11] = {0, 14062},
    [12] = {0, 56250},    [13] = {0, 112500},   [14] = {0, 168750},    [15] = {0, 25781},   [16] = {0, 103125},
    [17] = {0, 206250},   [18] = {0, 309375},   [19] = {11, 28125},    [20] = {20, 53125},  [21] = {160, 425000},
    [22] = {240, 637500}, [23] = {320, 850000}, [24] = {480, 1275000},
};
#define RATES ((int)(sizeof rates / sizeof *rates))

int ibv_rate_to_mult(int rate) { return rate >= 0 && rate < RATES && rates[rate].mult ? rates[rate].mult : -1; }

int ibv_rate_to_mbps(int rate) { return rate >= 0 && rate < RATES && rates[rate].mbps ? rates[rate].mbps : -1; }

int mult_to_ibv_rate(int mult) {
  for (int rate = 0; rate < RATES; rate++)
    if (mult > 0 && rates[rate].mult == mult) return rate;
  return 0; /* IBV_RATE_MAX */
}

int mbps_to_ibv_rate(int mbps) {
  for (int rate = 0; rate < RATES; rate++)
    if (mbps > 0 && rates[rate].mbps == mbps) return rate;
  return 0;
}
