/* The attributes of a device, through every call that queries them. */
#include "kit.h"

static void a_device_is_described_the_same_by_old_and_new_calls(void)
{
	struct ibv_context *context = open_device();
	struct ibv_device_attr old;
	struct ibv_device_attr_ex new;
	EQUAL(ibv_query_device(context, &old), 0);
	memset(&new, 0xff, sizeof new);
	EQUAL(ibv_query_device_ex(context, NULL, &new), 0);
	CHECK(!strcmp(old.fw_ver, new.orig_attr.fw_ver));
	EQUAL(old.max_mr_size, new.orig_attr.max_mr_size);
	EQUAL(old.max_cqe, new.orig_attr.max_cqe);
	EQUAL(old.local_ca_ack_delay, new.orig_attr.local_ca_ack_delay);
	EQUAL(new.phys_port_cnt_ex, 1);
	EQUAL(new.completion_timestamp_mask, 0); /* not supported */
	EQUAL(new.hca_core_clock, 1000000); /* kHz */
	EQUAL(new.odp_caps.general_caps, 0);
	EQUAL(new.tso_caps.max_tso, 0);
	EQUAL(new.max_dm_size, 0);
	EQUAL(new.device_cap_flags_ex & 0xffffffff, old.device_cap_flags);
	CHECK(old.device_cap_flags & IBV_DEVICE_MEM_WINDOW);
	CHECK(old.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B);
	EQUAL(old.phys_port_cnt, 1);
	EQUAL(old.node_guid, ibv_get_device_guid(context->device));
	CHECK(old.max_qp > 0 && old.max_cqe > 0 && old.max_mr > 0 && old.max_srq_wr > 0 && old.max_sge > 0);
	struct ibv_query_device_ex_input input = { .comp_mask = 1 };
	EQUAL(ibv_query_device_ex(context, &input, &new), EINVAL);
	EQUAL(ibv_query_device(context, NULL), EINVAL);
	EQUAL(ibv_query_device(NULL, &old), EINVAL);
	struct ibv_values_ex values = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };
	EQUAL(ibv_query_rt_values_ex(context, &values), 0);
	struct timespec before = values.raw_clock;
	usleep(1000);
	EQUAL(ibv_query_rt_values_ex(context, &values), 0);
	CHECK(values.raw_clock.tv_sec == 0 && values.raw_clock.tv_nsec >= before.tv_nsec + 1000000);
	values.comp_mask = 1 << 5;
	EQUAL(ibv_query_rt_values_ex(context, &values), EINVAL);
	EQUAL(ibv_close_device(context), 0);
}

static void the_gid_table_is_the_same_entry_by_entry(void)
{
	struct ibv_context *context = open_device();
	struct ibv_port_attr port;
	struct ibv_gid_entry table[64], entry;
	union ibv_gid gid;
	EQUAL(ibv_query_port(context, 1, &port), 0);
	CHECK(port.gid_tbl_len > 0 && port.gid_tbl_len < 64);
	EQUAL(ibv_query_gid_table(context, table, 64, 0), port.gid_tbl_len);
	for (int i = 0; i < port.gid_tbl_len; i++) {
		EQUAL(ibv_query_gid_ex(context, 1, i, &entry, 0), 0);
		CHECK(!memcmp(&entry, &table[i], sizeof entry));
		EQUAL(entry.gid_index, i);
		EQUAL(entry.port_num, 1);
		EQUAL(entry.gid_type, IBV_GID_TYPE_ROCE_V2);
		CHECK(entry.ndev_ifindex > 0);
		EQUAL(ibv_query_gid(context, 1, i, &gid), 0);
		CHECK(!memcmp(&gid, &entry.gid, sizeof gid));
	}
	EQUAL(ibv_query_gid_ex(context, 1, port.gid_tbl_len, &entry, 0), EINVAL);
	EQUAL(ibv_query_gid_ex(context, 2, 0, &entry, 0), EINVAL);
	EQUAL(ibv_query_gid_ex(context, 1, 0, &entry, 1), EINVAL);
	EQUAL(ibv_query_gid_table(context, table, port.gid_tbl_len - 1, 0), -EINVAL);
	EQUAL(ibv_query_gid_table(NULL, table, 64, 0), -EINVAL);
	EQUAL(ibv_query_gid(context, 1, -1, &gid), -1);
	EQUAL(ibv_query_gid(context, 1, port.gid_tbl_len, &gid), -1);
	EQUAL(ibv_query_gid(context, 1, 0, NULL), -1);
	EQUAL(errno, EINVAL);
	EQUAL(ibv_close_device(context), 0);
}

static void the_port_is_an_active_ethernet_port(void)
{
	struct ibv_context *context = open_device();
	struct ibv_port_attr port;
	uint16_t pkey = 0;
	EQUAL(ibv_query_port(context, 1, &port), 0);
	EQUAL(port.state, IBV_PORT_ACTIVE);
	EQUAL(port.link_layer, IBV_LINK_LAYER_ETHERNET);
	CHECK(port.active_mtu >= IBV_MTU_256 && port.active_mtu <= port.max_mtu);
	EQUAL(port.pkey_tbl_len, 1);
	EQUAL(port.lid, 0);
	EQUAL(port.max_msg_sz, 1u << 31);
	EQUAL(ibv_query_port(context, 0, &port), EINVAL);
	EQUAL(ibv_query_port(context, 2, &port), EINVAL);
	EQUAL(ibv_query_pkey(context, 1, 0, &pkey), 0);
	EQUAL(be16toh(pkey), 0xffff);
	EQUAL(ibv_query_pkey(context, 1, 1, &pkey), -1);
	EQUAL(ibv_get_pkey_index(context, 1, htobe16(0x7fff)), 0);
	EQUAL(ibv_get_pkey_index(context, 1, htobe16(0x8001)), -1);
	EQUAL(ibv_close_device(context), 0);
}

/* Objects can be as large as the reported limits, and no larger. */
static void limits_are_what_can_be_had(void)
{
	struct side side = make_parts(open_device(), NULL);
	struct ibv_device_attr limit;
	EQUAL(ibv_query_device(side.context, &limit), 0);
	struct ibv_cq *cq = ibv_create_cq(side.context, limit.max_cqe, NULL, NULL, 0);
	CHECK(cq && cq->cqe == limit.max_cqe);
	EQUAL(ibv_destroy_cq(cq), 0);
	CHECK(!ibv_create_cq(side.context, limit.max_cqe + 1, NULL, NULL, 0));
	EQUAL(errno, EINVAL);
	struct ibv_qp_init_attr init = plan(side.cq, IBV_QPT_RC);
	init.cap = (struct ibv_qp_cap){ limit.max_qp_wr, limit.max_qp_wr, limit.max_sge, limit.max_sge, 0 };
	CHECK(side.qp = ibv_create_qp(side.pd, &init));
	init.cap.max_send_wr++;
	CHECK(!ibv_create_qp(side.pd, &init));
	EQUAL(errno, EINVAL);
	init.cap = (struct ibv_qp_cap){ .max_send_wr = 1, .max_send_sge = limit.max_sge + 1 };
	CHECK(!ibv_create_qp(side.pd, &init));
	EQUAL(errno, EINVAL);
	struct ibv_mr *mr = ibv_reg_mr(side.pd, side.bytes, limit.max_mr_size + 1, 0);
	CHECK(!mr);
	EQUAL(errno, EINVAL);
	destroy_side(&side);
	EQUAL(ibv_close_device(side.context), 0);
}

static void what_is_not_supported_says_so(void)
{
	struct side side = make_side(open_device(), IBV_QPT_UD);
	struct ibv_context *context = side.context;
	CHECK(!ibv_open_xrcd(context, &(struct ibv_xrcd_init_attr){ 0 }));
	EQUAL(errno, EOPNOTSUPP);
	CHECK(!ibv_open_qp(context, &(struct ibv_qp_open_attr){ 0 }));
	EQUAL(errno, EOPNOTSUPP);
	CHECK(!ibv_create_flow(side.qp, &(struct ibv_flow_attr){ 0 }));
	EQUAL(errno, EOPNOTSUPP);
	CHECK(!ibv_create_wq(context, &(struct ibv_wq_init_attr){ 0 }));
	EQUAL(errno, EOPNOTSUPP);
	CHECK(!ibv_alloc_td(context, &(struct ibv_td_init_attr){ 0 }));
	EQUAL(errno, EOPNOTSUPP);
	CHECK(!ibv_create_counters(context, &(struct ibv_counters_init_attr){ 0 }));
	EQUAL(errno, EOPNOTSUPP);
	CHECK(!ibv_import_device(0) && !ibv_import_pd(context, 1) && !ibv_import_mr(side.pd, 1));
	EQUAL(errno, EOPNOTSUPP);
	EQUAL(ibv_modify_cq(side.cq, &(struct ibv_modify_cq_attr){ 0 }), EOPNOTSUPP);
	EQUAL(ibv_modify_qp_rate_limit(side.qp, &(struct ibv_qp_rate_limit_attr){ 0 }), EOPNOTSUPP);
	destroy_side(&side);
	EQUAL(ibv_close_device(context), 0);
}

/* Every number has a name, even an invalid one. */
static void every_number_has_a_name(void)
{
	for (int i = -2; i < 100; i++) {
		CHECK(ibv_wc_status_str(i) && ibv_event_type_str(i) && ibv_node_type_str(i));
		CHECK(ibv_port_state_str(i));
	}
	CHECK(!strcmp(ibv_wc_status_str(IBV_WC_SUCCESS), "success"));
	CHECK(!strcmp(ibv_wc_status_str(IBV_WC_RNR_RETRY_EXC_ERR), "RNR retry counter exceeded"));
	CHECK(!strcmp(ibv_event_type_str(IBV_EVENT_SRQ_LIMIT_REACHED), "SRQ limit reached"));
	EQUAL(ibv_rate_to_mult(IBV_RATE_10_GBPS), 4);
	EQUAL(ibv_rate_to_mbps(IBV_RATE_100_GBPS), 103125);
	EQUAL(mbps_to_ibv_rate(103125), IBV_RATE_100_GBPS);
	EQUAL(ibv_rate_to_mult(1000), -1);
}

static void lists_of_devices_can_be_freed_at_once(void)
{
	int count = -1;
	struct ibv_device **list = ibv_get_device_list(&count), **second = ibv_get_device_list(NULL);
	CHECK(list && second && count > 0 && !list[count]);
	CHECK(list[0] == second[0]);
	struct ibv_device *device = list[count - 1];
	ibv_free_device_list(list);
	ibv_free_device_list(second);
	ibv_free_device_list(NULL);
	struct ibv_context *context = ibv_open_device(device), *again = ibv_open_device(device);
	CHECK(context && again && context != again && context->device == device);
	CHECK(ibv_get_device_name(device) && !ibv_get_device_name(NULL));
	EQUAL(ibv_close_device(context), 0);
	EQUAL(ibv_close_device(context), -1);
	EQUAL(errno, EINVAL);
	CHECK(!ibv_alloc_pd(context));
	struct ibv_pd *pd = ibv_alloc_pd(again); /* the other context still works */
	CHECK(pd);
	EQUAL(ibv_dealloc_pd(pd) | ibv_close_device(again), 0);
	CHECK(!ibv_open_device(NULL));
	EQUAL(errno, EINVAL);
}

int main(int argc, char **argv)
{
	static const struct test CASES[] = {
		CASE(a_device_is_described_the_same_by_old_and_new_calls),
		CASE(the_gid_table_is_the_same_entry_by_entry),
		CASE(the_port_is_an_active_ethernet_port),
		CASE(limits_are_what_can_be_had),
		CASE(what_is_not_supported_says_so),
		CASE(every_number_has_a_name),
		CASE(lists_of_devices_can_be_freed_at_once),
	};
	return RUN(CASES, argc, argv);
}
