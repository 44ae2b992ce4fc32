//! Constants of `infiniband/verbs.h`, and the table of them that the layout test compares.

macro_rules! constants {
    ($( $name:ident = $value:expr; )+) => {
        $( pub const $name: u32 = $value; )+

        /// Every constant by its C name.
        #[cfg(test)]
        pub const CONSTANTS: &[(&str, u32)] = &[ $( (stringify!($name), $name), )+ ];
    };
}

constants! {
    IBV_GID_TYPE_ROCE_V2 = 2;
    IBV_NODE_CA = 1;
    IBV_TRANSPORT_IB = 0;

    IBV_DEVICE_CURR_QP_STATE_MOD = 1 << 7;
    IBV_DEVICE_RC_RNR_NAK_GEN = 1 << 12;
    IBV_DEVICE_MEM_WINDOW = 1 << 17;
    IBV_DEVICE_MEM_MGT_EXTENSIONS = 1 << 21;
    IBV_DEVICE_MEM_WINDOW_TYPE_2B = 1 << 24;
    IBV_DEVICE_BAD_PKEY_CNTR = 1 << 1;
    IBV_DEVICE_BAD_QKEY_CNTR = 1 << 2;
    IBV_DEVICE_SYS_IMAGE_GUID = 1 << 11;
    IBV_ATOMIC_HCA = 1;

    IBV_MTU_4096 = 5;
    IBV_PORT_ACTIVE = 4;
    IBV_LINK_LAYER_ETHERNET = 2;
    IBV_PORT_CM_SUP = 1 << 16;
    IBV_PORT_IP_BASED_GIDS = 1 << 26;
    IBV_QPF_GRH_REQUIRED = 1 << 0;

    IBV_EVENT_CQ_ERR = 0;
    IBV_EVENT_QP_FATAL = 1;
    IBV_EVENT_QP_REQ_ERR = 2;
    IBV_EVENT_QP_ACCESS_ERR = 3;
    IBV_EVENT_COMM_EST = 4;
    IBV_EVENT_SQ_DRAINED = 5;
    IBV_EVENT_SRQ_ERR = 14;
    IBV_EVENT_SRQ_LIMIT_REACHED = 15;
    IBV_EVENT_QP_LAST_WQE_REACHED = 16;

    IBV_WC_SEND = 0;
    IBV_WC_RDMA_WRITE = 1;
    IBV_WC_RDMA_READ = 2;
    IBV_WC_COMP_SWAP = 3;
    IBV_WC_FETCH_ADD = 4;
    IBV_WC_BIND_MW = 5;
    IBV_WC_LOCAL_INV = 6;
    IBV_WC_RECV = 128;
    IBV_WC_RECV_RDMA_WITH_IMM = 129;
    IBV_WC_GRH = 1 << 0;
    IBV_WC_WITH_IMM = 1 << 1;
    IBV_WC_WITH_INV = 1 << 3;
    IBV_WC_STANDARD_FLAGS = 127;

    IBV_ACCESS_LOCAL_WRITE = 1;
    IBV_ACCESS_REMOTE_WRITE = 1 << 1;
    IBV_ACCESS_REMOTE_READ = 1 << 2;
    IBV_ACCESS_REMOTE_ATOMIC = 1 << 3;
    IBV_ACCESS_MW_BIND = 1 << 4;
    IBV_ACCESS_ZERO_BASED = 1 << 5;
    IBV_ACCESS_HUGETLB = 1 << 7;
    IBV_ACCESS_OPTIONAL_RANGE = 0x3ff0_0000;
    IBV_REREG_MR_CHANGE_TRANSLATION = 1 << 0;
    IBV_REREG_MR_CHANGE_PD = 1 << 1;
    IBV_REREG_MR_CHANGE_ACCESS = 1 << 2;
    IBV_REREG_MR_FLAGS_SUPPORTED = 7;
    IBV_MW_TYPE_1 = 1;
    IBV_MW_TYPE_2 = 2;

    IBV_SRQ_LIMIT = 1 << 1;
    IBV_SRQT_BASIC = 0;
    IBV_SRQ_INIT_ATTR_TYPE = 1 << 0;
    IBV_SRQ_INIT_ATTR_PD = 1 << 1;

    IBV_QPT_RC = 2;
    IBV_QPT_UC = 3;
    IBV_QPT_UD = 4;
    IBV_QP_INIT_ATTR_PD = 1 << 0;
    IBV_QP_INIT_ATTR_CREATE_FLAGS = 1 << 2;
    IBV_QP_INIT_ATTR_SEND_OPS_FLAGS = 1 << 6;
    IBV_QP_EX_WITH_RDMA_WRITE = 1 << 0;
    IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM = 1 << 1;
    IBV_QP_EX_WITH_SEND = 1 << 2;
    IBV_QP_EX_WITH_SEND_WITH_IMM = 1 << 3;
    IBV_QP_EX_WITH_RDMA_READ = 1 << 4;
    IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP = 1 << 5;
    IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD = 1 << 6;
    IBV_QP_EX_WITH_LOCAL_INV = 1 << 7;
    IBV_QP_EX_WITH_BIND_MW = 1 << 8;
    IBV_QP_EX_WITH_SEND_WITH_INV = 1 << 9;

    IBV_QP_STATE = 1 << 0;
    IBV_QP_CUR_STATE = 1 << 1;
    IBV_QP_EN_SQD_ASYNC_NOTIFY = 1 << 2;
    IBV_QP_ACCESS_FLAGS = 1 << 3;
    IBV_QP_PKEY_INDEX = 1 << 4;
    IBV_QP_PORT = 1 << 5;
    IBV_QP_QKEY = 1 << 6;
    IBV_QP_AV = 1 << 7;
    IBV_QP_PATH_MTU = 1 << 8;
    IBV_QP_TIMEOUT = 1 << 9;
    IBV_QP_RETRY_CNT = 1 << 10;
    IBV_QP_RNR_RETRY = 1 << 11;
    IBV_QP_RQ_PSN = 1 << 12;
    IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13;
    IBV_QP_MIN_RNR_TIMER = 1 << 15;
    IBV_QP_SQ_PSN = 1 << 16;
    IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17;
    IBV_QP_DEST_QPN = 1 << 20;
    IBV_QP_RATE_LIMIT = 1 << 25;

    IBV_QPS_RESET = 0;
    IBV_QPS_INIT = 1;
    IBV_QPS_RTR = 2;
    IBV_QPS_RTS = 3;
    IBV_QPS_SQD = 4;
    IBV_QPS_SQE = 5;
    IBV_QPS_ERR = 6;

    IBV_WR_RDMA_WRITE = 0;
    IBV_WR_RDMA_WRITE_WITH_IMM = 1;
    IBV_WR_SEND = 2;
    IBV_WR_SEND_WITH_IMM = 3;
    IBV_WR_RDMA_READ = 4;
    IBV_WR_ATOMIC_CMP_AND_SWP = 5;
    IBV_WR_ATOMIC_FETCH_AND_ADD = 6;
    IBV_WR_LOCAL_INV = 7;
    IBV_WR_BIND_MW = 8;
    IBV_WR_SEND_WITH_INV = 9;

    IBV_SEND_FENCE = 1 << 0;
    IBV_SEND_SIGNALED = 1 << 1;
    IBV_SEND_SOLICITED = 1 << 2;
    IBV_SEND_INLINE = 1 << 3;

    IBV_CQ_INIT_ATTR_MASK_FLAGS = 1 << 0;
    IBV_CQ_INIT_ATTR_MASK_PD = 1 << 1;
    IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS = 1 << 0;
    IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT = 1 << 1;
    IBV_VALUES_MASK_RAW_CLOCK = 1 << 0;
    IBV_CREATE_CQ_ATTR_SINGLE_THREADED = 1 << 0;
    IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN = 1 << 1;
    IBV_FORK_UNNEEDED = 2;
    IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE = 1;
    IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT = 2;
    IBV_ADVISE_MR_FLAG_FLUSH = 1;
}

/// `IBV_SYSFS_NAME_MAX`
pub const NAME_MAX: usize = 64;
/// `IBV_SYSFS_PATH_MAX`
pub const PATH_MAX: usize = 256;
/// A full member of the default partition, in host byte order.
pub const DEFAULT_PKEY: u16 = 0xffff;
