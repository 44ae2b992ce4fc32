"""Tests of the lab itself, without a guest: python3 -m unittest discover interop"""

import argparse
import gzip
import pathlib
import socket
import struct
import sys
import tempfile
import threading
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import browser
import build
import cases
import conformance
import lab
import matrix
import rdma_core
import sandbox
import stacks

DEVINFO = """hca_id:\tlo_rdma
\ttransport:\t\t\tInfiniBand (0)
\t\t\tGID[  0]:\t\t::ffff:127.0.0.1, RoCE v2
hca_id:\trxe0
\t\t\tGID[  0]:\t\tfe80::5054:ff:fe77:2, RoCE v2
\t\t\tGID[  1]:\t\t::ffff:10.77.0.2, RoCE v2
\t\t\tGID[  2]:\t\tfd77:0:0::2, RoCE v2
"""
ROWS = """ #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 2          5                0.00               0.00               0.000500
 4          5                0.10               0.09               0.000500
"""
PINGPONG = "819200 bytes in 0.10 seconds = 64.25 Mbit/sec\n100 iters in 0.10 seconds = 1020.0 usec/iter\n"


def case(name):
    return next(case for case in cases.all_cases() if case.name == name)


def good(text):
    return lab.Result(0, text)


class Verdicts(unittest.TestCase):
    pingpong = case("ibv_rc_pingpong -c -n 100")

    def state(self, chosen, server, client):
        return cases.verdict(chosen, server, client)[0]

    def test_a_pair_that_prints_results_passes(self):
        self.assertEqual(self.state(self.pingpong, good(PINGPONG), good(PINGPONG)), cases.PASS)

    def test_each_way_to_fail(self):
        bad = {
            "exit": lab.Result(1, PINGPONG),
            "killed": lab.Result(None, PINGPONG),
            "silent": good(""),
            "wrong bytes": good(PINGPONG + "invalid data in page 3\n"),
        }
        for name, result in bad.items():
            with self.subTest(name):
                self.assertEqual(self.state(self.pingpong, result, good(PINGPONG)), cases.FAIL)
                self.assertEqual(self.state(self.pingpong, good(PINGPONG), result), cases.FAIL)

    def test_all_sizes_must_be_there(self):
        every = case("ib_send_bw -c RC -a -n 5")
        self.assertEqual(self.state(every, good(ROWS), good(ROWS)), cases.FAIL)
        for figure, count, state in (("nan", 5, cases.FAIL), ("0.0", 4, cases.FAIL), ("0.0", 5, cases.PASS)):
            full = "".join(f" {size}  {count}  {figure}  1.5  0.1\n" for size in cases.ALL_SIZES)
            self.assertEqual(self.state(every, good(full), good(full)), state)

    def test_only_what_perftest_refuses_is_unsupported(self):
        events = case("ib_write_bw -c RC -e -s 8192 -n 20")
        text = " Events feature not available on WRITE verb\n Parser function exited with Error\n"
        refused, unstarted = lab.Result(1, text), lab.Result(1, "not started")
        self.assertEqual(self.state(events, refused, unstarted), cases.UNSUPPORTED)
        self.assertEqual(self.state(events, good(text), good("")), cases.FAIL)
        unsupported = lab.Result(1, "Couldn't create QP: Operation not supported")
        self.assertEqual(self.state(events, unsupported, unstarted), cases.FAIL)


class Lists(unittest.TestCase):
    def test_names_are_unique_and_the_quick_part_is_a_part(self):
        names = [case.name for case in cases.all_cases()]
        self.assertEqual(len(names), len(set(names)))
        quick = [case for case in cases.all_cases() if case.quick]
        self.assertTrue(20 < len(quick) < len(names) / 2)

    def test_every_operation_of_the_program_is_a_case(self):
        source = pathlib.Path(__file__).with_name("wire_cases.c").read_text()
        for name in cases.WIRE_CASES:
            self.assertIn(f'{{ "{name}", ', source)
        self.assertEqual(source.count("_requester, "), len(cases.WIRE_CASES))


class Parsing(unittest.TestCase):
    def test_the_device_is_the_one_with_the_address(self):
        self.assertEqual(lab.parse_devinfo(DEVINFO, "10.77.0.2", "fd77::2"), lab.Device("rxe0", {4: 1, 6: 2}))
        with self.assertRaises(LookupError):
            lab.parse_devinfo(DEVINFO, "10.77.0.9", "fd77::9")

    def test_rows(self):
        self.assertEqual(cases.rows_of(ROWS), [(2, 5, 0.0), (4, 5, 0.1)])

    def test_the_archive_of_the_guest(self):
        archive = build.cpio([("dev", 0o40755, b""), ("init", 0o100755, b"#!")])
        self.assertEqual(archive[:6], b"070701")
        self.assertIn(b"init\0", archive)
        self.assertEqual(len(archive) % 4, 0)
        self.assertEqual(int(archive[54:62], 16), 0)

    def test_libraries_of_an_elf_file(self):
        self.assertIn("libc.so.6", build.needed_libraries(pathlib.Path(sys.executable).resolve().read_bytes()))
        self.assertEqual(build.needed_libraries(b"#!/bin/sh"), [])

    def test_modules_come_after_what_they_need(self):
        modules = {"a": module("b,c"), "b": module("c"), "c": module("")}
        self.assertEqual(build.load_order(["a", "built_in"], modules), ["c", "b", "a"])


def module(depends):
    """A relocatable ELF file with only a `.modinfo` section."""
    info, names = f"depends={depends}\0".encode(), b"\0.modinfo\0.shstrtab\0"
    header = 64
    sections = struct.pack("<IIQQQQIIQQ", *[0] * 10)
    sections += struct.pack("<IIQQQQIIQQ", 1, 1, 0, 0, header, len(info), 0, 0, 1, 0)
    sections += struct.pack("<IIQQQQIIQQ", 10, 3, 0, 0, header + len(info), len(names), 0, 0, 1, 0)
    at = header + len(info) + len(names)
    elf = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 1, 62, 1, 0, 0, at, 0, 64, 0, 0, 64, 3, 2)
    return elf + info + names + sections


LISTENER = "import socket, time; s = socket.create_server(('127.0.0.1', {port})); print('up', flush=True); time.sleep({s})"


class Losses(unittest.TestCase):
    def test_only_counters_of_lost_packets_that_are_not_0(self):
        with tempfile.TemporaryDirectory() as folder:
            net = pathlib.Path(folder)
            (net / "snmp6").write_text("Udp6InDatagrams   7\nUdp6RcvbufErrors   3\nIp6OutNoRoutes   0\n")
            (net / "snmp").write_text("Udp: InDatagrams InErrors\nUdp: 5 2\n")
            (net / "dev").write_text("Inter-|\n face |\n  lab: 9 9 9 1 0 0 0 0 8 8 8 0 0 0 0 0\n")
            self.assertEqual(lab.losses(net), "Udp6RcvbufErrors: 3\nUdpInErrors: 2\nlab rx Discards: 1\n")


class HostRuns(unittest.TestCase):
    def start(self, command, limit_s):
        return lab.HostEnd("host", "127.0.0.1", "::1", "env LAB_TEST=1").start(command, limit_s)

    def listener(self, seconds, limit_s):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        return self.start([sys.executable, "-c", LISTENER.format(port=port, s=seconds)], limit_s), port

    def test_the_runner_comes_first_and_the_exit_status_comes_back(self):
        result = self.start(["sh", "-c", "echo $LAB_TEST; exit 3"], 30).finish()
        self.assertEqual(result, lab.Result(3, "1\n"))

    def test_a_program_that_lost_a_wake_up_has_failed(self):
        text = f"dquant: {sandbox.RESCUED}: work has waited"
        for code, wanted in ((0, 1), (3, 3)):
            result = self.start(["sh", "-c", f"echo '{text}' >&2; exit {code}"], 30).finish()
            self.assertEqual(result, lab.Result(wanted, f"{text}\n"))

    def test_a_listening_program_is_seen(self):
        run, port = self.listener(0, 30)
        self.assertTrue(run.wait_listening(port) or run.process.poll() == 0)
        self.assertEqual(run.finish().code, 0)

    def test_a_program_that_does_not_end_is_ended(self):
        run, port = self.listener(600, 30)
        self.assertTrue(run.wait_listening(port))
        run.stop()
        self.assertEqual(run.finish(), lab.Result(None, "up\n"))
        self.assertIsNotNone(run.process.poll())

    def test_a_program_that_ends_does_not_listen(self):
        run = self.start(["true"], 30)
        self.assertFalse(run.wait_listening(1))
        run.finish()


class Documents(unittest.TestCase):
    def test_only_what_is_between_the_markers_changes(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "doc.md")
            path.write_text("a\n<!-- interop:x:begin -->\nold\n<!-- interop:x:end -->\nb\n")
            matrix.write_between_markers(path, "x", "new \\1")
            matrix.write_between_markers(path, "x", "newer \\1")
            self.assertEqual(path.read_text(), "a\n<!-- interop:x:begin -->\nnewer \\1\n<!-- interop:x:end -->\nb\n")

    def test_a_run_adds_to_the_one_before(self):
        columns = [matrix.Column(title, None, None, 4) for title in "ab"]
        old, new, halfway = cases.all_cases()[:3]
        former = {(case.name, column.title): matrix.Cell(cases.PASS, "") for case in (old, new) for column in columns}
        former |= {(halfway.name, "a"): matrix.Cell(cases.PASS, ""), (halfway.name, "b"): matrix.Cell(matrix.NOT_RUN, "")}
        document = matrix.as_json("t", [old, new, halfway], columns, former, 5, [])
        now = {(new.name, title): matrix.Cell(cases.FAIL, "why") for title in "ab"}
        chosen, cells, seconds = matrix.with_former(document, columns, now, 7)
        self.assertEqual((chosen, seconds), ([old, new], 12))
        self.assertEqual([cell.state for cell in cells.values()], [cases.PASS] * 2 + [cases.FAIL] * 2)

    def test_a_reason_is_written_once(self):
        column = matrix.Column("c", None, None, 4)
        chosen = cases.all_cases()[:2]
        cells = {(case.name, "c"): matrix.Cell(cases.FAIL, "same | reason") for case in chosen}
        text = matrix.markdown(chosen, [column], cells, [])
        self.assertEqual(text.count("same / reason"), 1)
        self.assertEqual(text.count("**fail** (1)"), 2)


class Stacks(unittest.TestCase):
    def test_every_rank_must_be_ok(self):
        said = "Ran 36 tests in 1s\n\nOK\n"
        self.assertEqual(stacks.of_unittest(lab.Result(0, said * 2)), (cases.PASS, "36 tests on each of 2 ranks"))
        mixed = "..Ran 36 tests in 1s\n\nRan 36 tests in 1s\n\nOKOK\n"
        self.assertEqual(stacks.of_unittest(lab.Result(0, mixed))[0], cases.PASS)
        for result in (lab.Result(0, said + "Ran 36 tests in 1s\n\nFAILED (failures=1)\n"), lab.Result(1, said * 2),
                       lab.Result(None, said), lab.Result(0, "")):
            self.assertEqual(stacks.of_unittest(result)[0], cases.FAIL)
        failed = lab.Result(1, said + "FAIL: testGet (test_rma.TestRMAWorld)\nRan 36 tests in 1s\n")
        self.assertEqual(stacks.of_unittest(failed)[1], "FAIL: testGet (test_rma.TestRMAWorld)")


def of_suite(module, state, text="", name="Class.test_x"):
    return {"module": module, "name": name, "state": state, "text": text}


class RdmaCore(unittest.TestCase):
    def test_every_skip_has_its_reason(self):
        for module, text, why in (
                ("test_mlx5_cq", "Create Extended CQ is not supported", "other vendors' devices"),
                ("test_qpex", "Create XRCD is not supported", "XRC"),
                ("test_odp", "There are no huge pages of size 2M allocated", "on-demand paging"),
                ("test_parent_domain", "There are no huge pages of size 2M allocated", "huge pages, which this machine has none of"),
                ("test_qp", "Create Raw Packet QP with attrs is not supported", "flow steering and raw packets"),
                ("test_new", "something else", "something else")):
            self.assertEqual(rdma_core.reason(of_suite(module, rdma_core.SKIP, text)), why)

    def test_rows_count_each_place(self):
        there = [of_suite("test_cq", rdma_core.PASS), of_suite("test_cq", rdma_core.SKIP, "Create XRCD is not supported"),
                 of_suite("test_mlx5_a", rdma_core.SKIP, "x"), of_suite("test_mlx5_b", rdma_core.SKIP, "y")]
        here = [of_suite("test_cq", rdma_core.PASS), of_suite("test_cq", rdma_core.FAIL, "why")]
        self.assertEqual(list(rdma_core.rows({"there": there, "here": here})), [
            ["`test_cq`", "1 pass, 1 skipped", "1 pass, **1 fail**", "XRC: 1"],
            ["`test_mlx5_*`, `test_efa*`", "0 pass, 2 skipped", "0 pass", "other vendors' devices: 2"],
            ["all", "1 pass, 3 skipped", "1 pass, **1 fail**", ""]])

    def test_compressed_sources_are_unpacked(self):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as unpacked:
            folder, unpacked = pathlib.Path(folder), pathlib.Path(unpacked)
            with self.assertRaises(lab.Missing):
                rdma_core.sources(folder, unpacked)
            (folder / "run_tests.py").write_text("one")
            self.assertEqual(rdma_core.sources(folder, unpacked), folder)
            (folder / "base.py.gz").write_bytes(gzip.compress(b"two"))
            self.assertEqual(rdma_core.sources(folder, unpacked), unpacked)
            self.assertEqual({file.name: file.read_text() for file in unpacked.iterdir()}, {"run_tests.py": "one", "base.py": "two"})

    def test_a_suite_that_crashes_has_failed(self):
        options = argparse.Namespace(runner="false")
        found = rdma_core.run((), "self", "dq_lo", pathlib.Path("/nowhere"), options)
        self.assertEqual([test["state"] for test in found], [rdma_core.FAIL])


CELLS = """test loaded_device ... devices ["rxe0"]
pass   rc: send
lacks  rc: region that changes (ibv_rereg_mr)
wrong  rc: wrong local key (how the send ended: LocalQpError and not LocalProtectionError)
passed 1 of 3 cells
"""


class Conformance(unittest.TestCase):
    def states(self, text, code=101):
        return [cell.state for cell in conformance.parse(lab.Result(code, text)).values()]

    def test_each_state(self):
        self.assertEqual(self.states(CELLS), [cases.PASS, cases.UNSUPPORTED, conformance.DEVIATES])
        cells = conformance.parse(lab.Result(101, CELLS))
        self.assertEqual(cells["rc: region that changes"].reason, "soft-RoCE does not support `ibv_rereg_mr`")

    def test_a_deviation_ends_in_one_way_only(self):
        other = CELLS.replace("LocalQpError", "Success")
        self.assertEqual(self.states(other)[2], cases.FAIL)
        self.assertEqual(self.states(CELLS.replace("wrong local key", "flush"))[2], cases.FAIL)

    def test_a_program_that_ends_early_has_failed(self):
        lines = CELLS.splitlines(keepends=True)
        for text in ("", "".join(lines[:3]), "".join(lines[:2] + lines[-1:])):
            self.assertEqual(self.states(text, None)[-1], cases.FAIL)


class Sockets(unittest.TestCase):
    """The WebSocket with which the browser is steered, against a peer that is written here."""

    def peer(self, stream, heard):
        while b"\r\n\r\n" not in heard[0]:
            heard[0] += stream.recv(4096)
        stream.sendall(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
        # A message in two fragments with a ping between them, one of 300 and one of 70,000 bytes, and the end.
        stream.sendall(b"\x01\x03abc" + b"\x89\x02hi" + b"\x80\x03def")
        stream.sendall(b"\x81\x7e" + struct.pack(">H", 300) + b"x" * 300)
        stream.sendall(b"\x81\x7f" + struct.pack(">Q", 70000) + b"y" * 70000 + b"\x88\x00")
        heard[1] = stream.recv(4096)

    def test_fragments_pings_and_lengths(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            heard = [b"", b""]

            def serve():
                with server.accept()[0] as stream:
                    self.peer(stream, heard)

            thread = threading.Thread(target=serve)
            thread.start()
            port = server.getsockname()[1]
            client = browser.WebSocket(f"ws://127.0.0.1:{port}/devtools", 30)
            self.assertEqual(client.receive(), "abcdef")
            self.assertEqual(client.receive(), "x" * 300)
            self.assertEqual(client.receive(), "y" * 70000)
            with self.assertRaises(browser.Failed):
                client.receive()
            thread.join()
            client.stream.close()
        self.assertIn(b"GET /devtools HTTP/1.1\r\n", heard[0])
        pong, masked = heard[1][:2], heard[1][6:]
        self.assertEqual(pong, b"\x8a\x82")
        self.assertEqual(bytes(byte ^ heard[1][2 + at] for at, byte in enumerate(masked)), b"hi")

    def test_a_server_that_speaks_something_else_is_refused(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            def serve():
                with server.accept()[0] as stream:
                    stream.recv(4096)
                    stream.sendall(b"HTTP/1.1 404 Not Found\r\n\r\n")

            thread = threading.Thread(target=serve)
            thread.start()
            with self.assertRaises(browser.Failed):
                browser.WebSocket(f"ws://127.0.0.1:{server.getsockname()[1]}/", 30)
            thread.join()


if __name__ == "__main__":
    unittest.main()
