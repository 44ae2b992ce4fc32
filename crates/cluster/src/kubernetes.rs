//! What a Kubernetes scheduler extender answers, so that the scheduler places pods where the brain
//! has placed their job.
//!
//! The scheduler asks over HTTP, with the objects of `k8s.io/kube-scheduler/extender/v1` as JSON:
//! which nodes a pod may have (filter), which it should have (prioritize), and, where the extender
//! binds, whether it may have one (bind). A pod is of a job by its annotations:
//!
//! | annotation | what it says |
//! |---|---|
//! | `dquant.dev/job` | the job, as it is written: `ring:8@5G slots=1` |
//! | `dquant.dev/group` | the name that all its pods share; by default the labels `dquant.dev/group` and `job-name` of batch jobs |
//! | `dquant.dev/rank` | the rank of the pod; by default the index of an indexed job |
//!
//! [`wanted`] reads these, and the caller finds out, or lets the brain decide, where the job is
//! ([`State`]). A pod with a rank gets the node of its rank, and one without any node of its job,
//! those with more workers first. Pods without annotations are not touched.

use std::collections::BTreeMap;

use parfait::demand::Order;
use parfait::job::{Job, JobError};
use parfait::loads::Piece;
use parfait::pattern::Pattern;
use parfait::separation::{MAX_NAME_BYTES, is_name};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;

/// Says which job.
pub const JOB: &str = "dquant.dev/job";
/// Says which pods are of one job.
pub const GROUP: &str = "dquant.dev/group";
/// Says which worker of the job a pod is.
pub const RANK: &str = "dquant.dev/rank";

/// Labels of batch jobs with the name that all their pods share.
const BATCH_NAMES: [&str; 2] = ["batch.kubernetes.io/job-name", "job-name"];
/// The index of a pod of an indexed job: an annotation, and a label too in newer versions.
const BATCH_INDEX: &str = "batch.kubernetes.io/job-completion-index";

/// The best score that an extender gives (`MaxExtenderPriority`).
pub const BEST_SCORE: i64 = 10;

/// What the scheduler asks with: `ExtenderArgs`. It names nodes or, where the extender caches them,
/// only their names.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct ExtenderArgs {
    /// The pod.
    #[serde(rename = "Pod", alias = "pod")]
    pub pod: Pod,
    /// Nodes that it could have.
    #[serde(rename = "Nodes", alias = "nodes", default)]
    pub nodes: Option<NodeList>,
    /// Their names.
    #[serde(rename = "NodeNames", alias = "nodeNames", default)]
    pub node_names: Option<Vec<String>>,
}

/// What is read of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Pod {
    /// Its name and what it is marked with.
    #[serde(default)]
    pub metadata: Metadata,
}

/// What is read of any object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Metadata {
    /// Its name.
    pub name: String,
    /// Its namespace; of nodes none.
    pub namespace: String,
    /// Marks that select.
    pub labels: Option<BTreeMap<String, String>>,
    /// Marks that do not.
    pub annotations: Option<BTreeMap<String, String>>,
}

/// Nodes, each as it came: the scheduler gets those back that are left.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeList {
    /// The nodes.
    #[serde(default)]
    pub items: Vec<Value>,
    /// All else of the list.
    #[serde(flatten)]
    pub rest: serde_json::Map<String, Value>,
}

/// Which nodes are left: `ExtenderFilterResult`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderFilterResult {
    /// As nodes, if these were asked with.
    pub nodes: Option<NodeList>,
    /// As names, if these were asked with.
    pub node_names: Option<Vec<String>>,
    /// Why others are not, where that may change if another pod goes.
    pub failed_nodes: BTreeMap<String, String>,
    /// Why others are not, whatever other pods do.
    pub failed_and_unresolvable_nodes: BTreeMap<String, String>,
    /// Why nothing can be said.
    pub error: String,
}

/// How good a node is: an entry of `HostPriorityList`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct HostPriority {
    /// The node.
    pub host: String,
    /// From 0 to [`BEST_SCORE`].
    pub score: i64,
}

/// What the scheduler binds with: `ExtenderBindingArgs`. It says nothing of marks, so the caller
/// has to know the pod.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderBindingArgs {
    /// The pod.
    pub pod_name: String,
    /// Its namespace.
    pub pod_namespace: String,
    /// Its UID.
    #[serde(rename = "PodUID")]
    pub pod_uid: String,
    /// The node.
    pub node: String,
}

/// Whether it may be bound: `ExtenderBindingResult`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderBindingResult {
    /// Why not; empty if it may.
    pub error: String,
}

/// A pod's part in a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The name of the job: the namespace and the group of its pods.
    pub name: String,
    /// The job.
    pub job: Job,
    /// Which of its workers; `None` if that does not matter.
    pub rank: Option<u32>,
}

/// Why a pod's marks say nothing.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MarkError {
    /// Its job cannot be.
    #[error("annotation {JOB}: {0}")]
    Job(#[from] JobError),
    /// Nothing says which pods are of its job.
    #[error("it has {JOB}, but no group: annotate its pods with {GROUP}")]
    NoGroup,
    /// Nothing says whose its job is.
    #[error("it has {JOB}, but no namespace")]
    NoNamespace,
    /// Its group is no name.
    #[error(
        "'{0}' is no name of a job: at most {MAX_NAME_BYTES} letters, digits, '.', '_' and '-'"
    )]
    Name(String),
    /// Its rank is none of the job.
    #[error("rank '{rank}' is none of {workers} workers")]
    Rank {
        /// What is written.
        rank: String,
        /// How many there are.
        workers: u32,
    },
}

/// Where a job is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// It has been placed: the node of each worker, by rank.
    Placed(Vec<String>),
    /// It is being placed.
    Waiting,
    /// The brain refused it.
    Refused(String),
}

/// The nodes of all workers of a placed job, by rank of the pattern.
pub fn nodes_by_rank<'a>(
    pattern: &Pattern,
    order: Order,
    pieces: &[Piece],
    name_of: impl Fn(u32) -> &'a str,
) -> Vec<String> {
    let workers = pieces.iter().map(|piece| piece.run.end).max().unwrap_or(0);
    let mut nodes = vec![String::new(); workers as usize];
    for piece in pieces {
        for place in piece.run.first..piece.run.end {
            if let Some(node) = nodes.get_mut(order.rank(pattern, place) as usize) {
                name_of(piece.host).clone_into(node);
            }
        }
    }
    nodes
}

/// The part that a pod has in a job; `None` if it is of none.
///
/// # Errors
/// Says which mark is wrong.
pub fn wanted(pod: &Pod) -> Result<Option<Wanted>, MarkError> {
    let Metadata { namespace, labels, annotations, .. } = &pod.metadata;
    let annotation = |key: &str| annotations.as_ref()?.get(key);
    let label = |key: &str| labels.as_ref()?.get(key);
    let Some(text) = annotation(JOB) else { return Ok(None) };
    let job: Job = text.parse()?;
    let batch = || BATCH_NAMES.iter().find_map(|key| label(key));
    let group = annotation(GROUP).or_else(|| label(GROUP)).or_else(batch);
    let group = group.filter(|group| !group.is_empty()).ok_or(MarkError::NoGroup)?;
    if namespace.is_empty() {
        return Err(MarkError::NoNamespace);
    }
    let name = format!("{namespace}.{group}");
    // Namespaces have no '.', so no two pairs of namespace and group are one name.
    if !is_name(&name) || namespace.contains('.') {
        return Err(MarkError::Name(name));
    }
    let workers = job.pattern.workers().map_err(JobError::from)?;
    let rank = annotation(RANK).or_else(|| annotation(BATCH_INDEX)).or_else(|| label(BATCH_INDEX));
    let rank = match rank {
        None => None,
        Some(text) => {
            let wrong = || MarkError::Rank { rank: text.clone(), workers };
            let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            let rank = text.parse().ok().filter(|rank| is_number && *rank < workers);
            Some(rank.ok_or_else(wrong)?)
        }
    };
    Ok(Some(Wanted { name, job, rank }))
}

/// How good a node is for a pod of a placed job: 0 if it may not have it.
fn score(wanted: &Wanted, nodes: &[String], node: &str) -> i64 {
    if let Some(rank) = wanted.rank {
        let is_own = nodes.get(rank as usize).is_some_and(|own| own == node);
        return if is_own { BEST_SCORE } else { 0 };
    }
    let count = |node: &str| nodes.iter().filter(|other| *other == node).count() as i64;
    let most = nodes.iter().map(|node| count(node)).max().unwrap_or(0).max(1);
    let own = count(node);
    if own == 0 { 0 } else { (own * BEST_SCORE / most).max(1) }
}

/// Which of the nodes a pod may have. `wanted` is what [`wanted`] says of it.
pub fn filter(
    args: &ExtenderArgs,
    wanted: Result<Option<(&Wanted, &State)>, &MarkError>,
) -> ExtenderFilterResult {
    if args.nodes.is_none() && args.node_names.is_none() {
        let error = "neither nodes nor their names were sent".to_owned();
        return ExtenderFilterResult { error, ..ExtenderFilterResult::default() };
    }
    let mut result = ExtenderFilterResult::default();
    let mut is_left = |node: &str| match why_not(&wanted, node) {
        None => true,
        Some((reason, may_change)) => {
            let failed = match may_change {
                true => &mut result.failed_nodes,
                false => &mut result.failed_and_unresolvable_nodes,
            };
            failed.insert(node.to_owned(), reason);
            false
        }
    };
    let names = args.node_names.as_ref();
    let names = names.map(|names| names.iter().filter(|name| is_left(name)).cloned().collect());
    let nodes = args.nodes.as_ref().map(|list| NodeList {
        items: list.items.iter().filter(|node| is_left(name_of(node))).cloned().collect(),
        rest: list.rest.clone(),
    });
    ExtenderFilterResult { nodes, node_names: names, ..result }
}

/// Why a pod may not have a node, and whether that may change.
fn why_not(
    wanted: &Result<Option<(&Wanted, &State)>, &MarkError>,
    node: &str,
) -> Option<(String, bool)> {
    match wanted {
        Ok(None) => None,
        Err(error) => Some((error.to_string(), false)),
        Ok(Some((wanted, State::Waiting))) => {
            Some((format!("job '{}' is being placed", wanted.name), true))
        }
        Ok(Some((wanted, State::Refused(reason)))) => {
            Some((format!("job '{}' was refused: {reason}", wanted.name), true))
        }
        Ok(Some((wanted, State::Placed(nodes)))) if score(wanted, nodes, node) > 0 => None,
        Ok(Some((wanted, State::Placed(nodes)))) => {
            let own = wanted.rank.and_then(|rank| Some((rank, nodes.get(rank as usize)?)));
            let reason = match own {
                Some((rank, own)) => format!("rank {rank} of job '{}' is on {own}", wanted.name),
                None => format!("job '{}' has no worker here", wanted.name),
            };
            Some((reason, false))
        }
    }
}

/// How good each of the nodes is; the same for all where a pod is of no job, or its job has no
/// place.
pub fn prioritize(
    args: &ExtenderArgs,
    wanted: Result<Option<(&Wanted, &State)>, &MarkError>,
) -> Vec<HostPriority> {
    let listed = args.nodes.iter().flat_map(|list| list.items.iter().map(name_of));
    let named = args.node_names.iter().flatten().map(String::as_str);
    let rate = |node: &str| {
        let score = match &wanted {
            Ok(Some((wanted, State::Placed(nodes)))) => score(wanted, nodes, node),
            _ => 0,
        };
        HostPriority { host: node.to_owned(), score }
    };
    listed.chain(named).map(rate).collect()
}

/// Whether a pod may be bound to a node.
pub fn bind(
    args: &ExtenderBindingArgs,
    wanted: Result<Option<(&Wanted, &State)>, &MarkError>,
) -> ExtenderBindingResult {
    let error = why_not(&wanted, &args.node).map_or_else(String::new, |(reason, _)| {
        format!("{}/{}: {reason}", args.pod_namespace, args.pod_name)
    });
    ExtenderBindingResult { error }
}

/// The name of a node; empty if it has none.
fn name_of(node: &Value) -> &str {
    node.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default()
}
