//! Requests of kube-scheduler, as it writes them, and what the extender answers.

use cluster::kubernetes::{
    ExtenderArgs, ExtenderBindingArgs, MarkError, Pod, State, Wanted, bind, filter, nodes_by_rank,
    prioritize, wanted,
};
use parfait::demand::Order;
use parfait::job::Job;
use parfait::loads::Piece;
use parfait::runs::Run;
use serde_json::{Value, json};

const FILTER_NODES: &str = include_str!("filter-nodes.json");
const FILTER_NAMES: &str = include_str!("filter-names.json");
const OTHER_POD: &str = include_str!("other-pod.json");
const BIND: &str = include_str!("bind.json");

fn args(text: &str) -> ExtenderArgs {
    serde_json::from_str(text).expect("a request")
}

fn of_pod(args: &ExtenderArgs) -> Wanted {
    wanted(&args.pod).expect("its marks are right").expect("it is of a job")
}

/// Ranks 0 and 1 on node0, 2 on node1, 3 on node2.
fn placed() -> State {
    State::Placed(["node0", "node0", "node1", "node2"].map(str::to_owned).into())
}

fn json_of(value: impl serde::Serialize) -> Value {
    serde_json::to_value(value).expect("it can be written")
}

#[test]
fn a_rank_of_an_indexed_job_gets_the_node_of_its_worker() {
    let args = args(FILTER_NODES);
    let own = of_pod(&args);
    assert_eq!((own.name.as_str(), own.rank), ("research.train", Some(2)));
    let state = placed();
    let answer = json_of(filter(&args, Ok(Some((&own, &state)))));
    let node1 = json!({
        "metadata": { "name": "node1", "uid": "a1" }, "spec": {}, "status": { "capacity": { "cpu": "64" } }
    });
    assert_eq!(
        answer,
        json!({
            "Nodes": { "metadata": {}, "items": [node1] },
            "NodeNames": null,
            "FailedNodes": {},
            "FailedAndUnresolvableNodes": {
                "node0": "rank 2 of job 'research.train' is on node1",
                "node2": "rank 2 of job 'research.train' is on node1",
            },
            "Error": "",
        })
    );
    assert_eq!(
        json_of(prioritize(&args, Ok(Some((&own, &state))))),
        json!([
            { "Host": "node0", "Score": 0 },
            { "Host": "node1", "Score": 10 },
            { "Host": "node2", "Score": 0 },
        ])
    );
}

#[test]
fn a_pod_without_a_rank_gets_any_node_of_its_job() {
    let args = args(FILTER_NAMES);
    let own = of_pod(&args);
    assert_eq!((own.name.as_str(), own.rank), ("research.train", None));
    let state = State::Placed(["node0", "node0", "node2", "node0"].map(str::to_owned).into());
    let answer = filter(&args, Ok(Some((&own, &state))));
    assert_eq!(answer.node_names, Some(vec!["node0".to_owned(), "node2".to_owned()]));
    assert_eq!(
        answer.failed_and_unresolvable_nodes["node1"],
        "job 'research.train' has no worker here"
    );
    let scores: Vec<i64> =
        prioritize(&args, Ok(Some((&own, &state)))).iter().map(|own| own.score).collect();
    assert_eq!(scores, [10, 0, 3]);
}

#[test]
fn a_job_without_a_place_keeps_its_pods_waiting_with_the_reason() {
    let args = args(FILTER_NAMES);
    let own = of_pod(&args);
    for (state, reason) in [
        (State::Waiting, "job 'research.train' is being placed"),
        (State::Refused("no link".to_owned()), "job 'research.train' was refused: no link"),
    ] {
        let answer = filter(&args, Ok(Some((&own, &state))));
        assert_eq!(answer.node_names, Some(vec![]));
        assert_eq!(answer.failed_nodes.len(), 3);
        assert!(answer.failed_nodes.values().all(|own| own == reason), "{answer:?}");
        assert!(prioritize(&args, Ok(Some((&own, &state)))).iter().all(|own| own.score == 0));
    }
}

#[test]
fn pods_of_no_job_are_left_alone() {
    let args = args(OTHER_POD);
    assert_eq!(wanted(&args.pod), Ok(None));
    let answer = filter(&args, Ok(None));
    assert_eq!(answer.node_names, args.node_names);
    assert!(answer.failed_nodes.is_empty() && answer.failed_and_unresolvable_nodes.is_empty());
}

#[test]
fn a_binding_is_allowed_where_the_worker_is() {
    let own = of_pod(&args(FILTER_NODES));
    let mut binding: ExtenderBindingArgs = serde_json::from_str(BIND).expect("a binding");
    let state = placed();
    assert_eq!(json_of(bind(&binding, Ok(Some((&own, &state))))), json!({ "Error": "" }));
    binding.node = "node2".to_owned();
    assert_eq!(
        bind(&binding, Ok(Some((&own, &state)))).error,
        "research/train-2-x7k4p: rank 2 of job 'research.train' is on node1"
    );
}

#[test]
fn marks_that_are_wrong_are_refused_with_the_reason() {
    let pod = |annotations: Value| -> Pod {
        let metadata = json!({ "name": "p", "namespace": "n", "annotations": annotations });
        serde_json::from_value(json!({ "metadata": metadata })).expect("a pod")
    };
    let marked = |job: &str, group: &str, rank: &str| {
        pod(json!({ "dquant.dev/job": job, "dquant.dev/group": group, "dquant.dev/rank": rank }))
    };
    let of_namespace = |namespace: &str| {
        let mut pod = marked("ring:4@1G", "g", "0");
        pod.metadata.namespace = namespace.to_owned();
        pod
    };
    for (pod, reason) in [
        (marked("star:4@1G", "g", "0"), "annotation dquant.dev/job: unknown pattern 'star'"),
        (marked("ring:4@1G", "a b", "0"), "'n.a b' is no name of a job"),
        (marked("ring:4@1G", &"g".repeat(70), "0"), "'n.ggg"),
        (marked("ring:4@1G", "g", "4"), "rank '4' is none of 4 workers"),
        (marked("ring:4@1G", "g", "+1"), "rank '+1' is none of 4 workers"),
        (marked("ring:4@1G", "", "0"), "it has dquant.dev/job, but no group"),
        (of_namespace(""), "it has dquant.dev/job, but no namespace"),
        (of_namespace("a.b"), "'a.b.g' is no name of a job"),
        (pod(json!({ "dquant.dev/job": "ring:4@1G" })), "it has dquant.dev/job, but no group"),
    ] {
        let error: MarkError = wanted(&pod).expect_err(reason);
        assert!(error.to_string().starts_with(reason), "{error}");
        let args = ExtenderArgs { pod, nodes: None, node_names: Some(vec!["node0".to_owned()]) };
        let answer = filter(&args, Err(&error));
        assert_eq!(answer.failed_and_unresolvable_nodes["node0"], error.to_string());
        assert_eq!(answer.node_names, Some(vec![]));
    }
    let nothing = ExtenderArgs { node_names: None, ..args(OTHER_POD) };
    assert_eq!(filter(&nothing, Ok(None)).error, "neither nodes nor their names were sent");
    assert!(
        serde_json::from_str::<ExtenderArgs>("{\"NodeNames\": []}").is_err(),
        "there is no pod"
    );
}

#[test]
fn nodes_are_named_by_rank_whatever_the_order_of_placement() {
    let job: Job = "torus:2x2@1G,1G".parse().expect("a job");
    let pieces = [Piece { host: 0, run: Run::new(0, 2) }, Piece { host: 1, run: Run::new(2, 4) }];
    let name = |host: u32| if host == 0 { "a" } else { "b" };
    let by_rank = |order| nodes_by_rank(&job.pattern, order, &pieces, name).join("");
    assert_eq!(by_rank(Order::Ranks), "aabb");
    // Columns are together: ranks 0 and 2, then 1 and 3.
    assert_eq!(by_rank(Order::Across), "abab");
}
