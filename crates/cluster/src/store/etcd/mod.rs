//! The store in etcd, for brains on several machines.
//!
//! | key below the prefix | value |
//! |---|---|
//! | `format` | the format of all this |
//! | `leader` | number and address of the brain that leads, signed; attached to its etcd lease, so it goes when that runs out |
//! | `opening` | term, opening, and how often that opening wrote |
//! | `snapshot` | the snapshot, signed |
//! | `log/AT` | a record, signed, under the number of bytes before it |
//! | `parts/…` | parts of a record or snapshot that does not fit into one request |
//!
//! **The term** is the revision in which `leader` was made. etcd's revisions only grow, and the key
//! is only made where there is none, so terms rise and each has one holder. Which lease has run out
//! is decided by etcd; no clock of a brain matters. A claim prolongs the lease first and then reads
//! the key with a quorum: an etcd leader that was cut off may still prolong leases, but cannot
//! answer that.
//!
//! **A write** is a transaction that compares the term and the whole value of `opening`, and raises
//! the count in it. So it is carried out at most once, however often it is sent, and never after
//! the log was opened again or the lease went to another. Where an attempt is refused since one
//! before it was carried out, the count tells.
//!
//! **Long values** are written in parts under a name of their own, and become valid with the
//! transaction that names them. Parts that nothing names are deleted when the log is opened, and
//! with each snapshot.

mod client;
mod rpc;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Mutex;
use std::time::Duration;

use parfait::brain::{Image, Lease, StorageError};
use service::seed::fresh_seed;
use tonic::transport::ClientTlsConfig;

use client::{Call, Client};
use rpc::compare::CompareResult;
use rpc::request_op::Request;
use rpc::{
    Compare, KeyValue, PutRequest, RangeRequest, RequestOp, TxnRequest, below, delete,
    end_of_prefix, get, made_in, op, put, value_is,
};

use super::signed::{self, Chain, SignedLog, Signer};
use super::{Candidate, Failure, Holder, Report, SetupError, Store, Tally, lock};
use crate::keys::{Keys, Signature};

/// The format that is written, and the only one that is read.
pub const FORMAT: &str = "2";

/// The format without signatures.
const UNSIGNED_FORMAT: &str = "1";

/// How long nobody else leads at most when signing a log breaks off.
const SIGNING_LEASE: Duration = Duration::from_secs(30);

/// Most bytes of a value: a third of what etcd takes in one request, where not configured
/// otherwise.
const PART_BYTES: usize = 512 << 10;

/// Most records of one answer. A log is not much longer than it may be before a snapshot.
const PAGE_RECORDS: i64 = 128;

/// Most parts of long values of one answer, which has to come in the time of a request.
const PAGE_PARTS: i64 = 4;

/// Most keys without values of one answer.
const PAGE_NAMES: i64 = 1000;

/// Most unnamed values that are deleted in one transaction, of 128 operations that etcd allows.
const SWEPT: usize = 64;

/// Which etcd, and how long to wait for it.
#[derive(Clone, Debug)]
pub struct Config {
    /// Members, as `http://HOST:PORT`, or `https://HOST:PORT` with `tls`.
    pub endpoints: Vec<String>,
    /// What all keys begin with; the brains of one cluster have the same.
    pub prefix: String,
    /// How long a lease lives that is not prolonged, in whole seconds. etcd grants no less than one
    /// and a half times its election timeout, which is 2 s with its defaults, and a new etcd leader
    /// prolongs every lease once.
    pub lease: Duration,
    /// After this the next member is asked.
    pub request_timeout: Duration,
    /// After this a call of the log fails; one of the lease fails after `lease`.
    pub call_timeout: Duration,
    /// Certificates.
    pub tls: Option<ClientTlsConfig>,
    /// Where etcd asks for a user.
    pub user: Option<User>,
}

/// A user of etcd.
#[derive(Clone)]
pub struct User {
    /// Its name.
    pub name: String,
    /// Its password, which is never printed.
    pub password: String,
}

impl fmt::Debug for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("User").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Config {
    /// With usual times, without TLS or user.
    pub fn new(endpoints: Vec<String>) -> Config {
        Config {
            endpoints,
            prefix: "/dquant/brain/".to_string(),
            lease: Duration::from_secs(1),
            request_timeout: Duration::from_millis(700),
            call_timeout: Duration::from_secs(3),
            tls: None,
            user: None,
        }
    }
}

/// See the module's text.
#[derive(Debug)]
pub struct EtcdStore {
    client: Client,
    names: Names,
    /// Signs what is written.
    signer: Signer,
    /// The format that is found.
    format: &'static str,
    /// Another one whose signatures are believed.
    old: Option<Signer>,
    lease: Duration,
    call_timeout: Duration,
    /// The etcd lease of this brain.
    id: Mutex<Option<i64>>,
    /// The log as this brain opened it; `None` when it has to be opened.
    log: tokio::sync::Mutex<Option<Log>>,
    tally: Tally,
}

impl EtcdStore {
    /// The store in that etcd, which need not run yet. To be called in a runtime of tokio.
    ///
    /// # Errors
    /// When an endpoint is malformed, or the certificates are.
    pub fn new(config: &Config, keys: &Keys) -> Result<EtcdStore, SetupError> {
        Ok(EtcdStore {
            client: Client::new(config)?,
            names: Names::new(&config.prefix),
            signer: Signer::new(keys, &config.prefix),
            format: FORMAT,
            old: None,
            lease: config.lease.max(Duration::from_secs(1)),
            call_timeout: config.call_timeout,
            id: Mutex::default(),
            log: tokio::sync::Mutex::default(),
            tally: Tally::default(),
        })
    }

    /// Signs the log in that etcd anew: one without signatures, or one that was signed with `old`
    /// keys. All of it or nothing.
    ///
    /// # Errors
    /// When etcd does not answer, a brain leads, or the log is signed with other keys.
    pub async fn sign_log(
        config: &Config,
        keys: &Keys,
        old: Option<&Keys>,
    ) -> Result<SignedLog, SetupError> {
        let config = Config { lease: SIGNING_LEASE, ..config.clone() };
        let mut store = EtcdStore::new(&config, keys)?;
        store.old = old.map(|old| Signer::new(old, &config.prefix));
        let place = format!("etcd {}{}", config.endpoints.join(","), config.prefix);
        let number = fresh_seed().unwrap_or_default().max(1);
        let candidate = Candidate { number, address: "sign-log".to_owned() };
        let signed = store.sign_stored(&candidate).await;
        // Where that fails, the lease runs out.
        let _ = store.give_back(&candidate).await;
        signed.map_err(|Failure { error, reason }| match error {
            StorageError::Fenced => SetupError::Busy { place, reason },
            StorageError::Unsigned => SetupError::Unsigned { place, reason },
            _ => SetupError::Endpoint { endpoint: config.endpoints.join(","), reason },
        })
    }

    async fn sign_stored(&mut self, candidate: &Candidate) -> Result<SignedLog, Failure> {
        let found = self.client.range(self.log_call(), get(&self.names.format)).await?;
        if found.kvs.first().is_some_and(|found| found.value == UNSIGNED_FORMAT.as_bytes()) {
            self.format = UNSIGNED_FORMAT;
        }
        let leader = self.client.range(self.log_call(), get(&self.names.leader)).await?;
        let busy = || Failure::fenced("a brain leads: stop all brains first");
        if !leader.kvs.is_empty() {
            return Err(busy());
        }
        let holder = self.take_lease(candidate).await?;
        if holder.lease.holder != candidate.number {
            return Err(busy());
        }
        let mut chain = match self.format {
            FORMAT => Chain::signed(self.old.iter().chain([&self.signer])),
            _ => Chain::unsigned(),
        };
        let (mut log, image) = self.open_log(holder.lease.term, 1, &mut chain).await?;
        self.rewrite(&mut log, &image).await?;
        Ok(SignedLog::of(&image, &chain, &self.signer))
    }

    fn log_call(&self) -> Call<'_> {
        Call { timeout: self.call_timeout, tally: &self.tally }
    }

    fn lease_call(&self) -> Call<'_> {
        Call { timeout: self.lease, tally: &self.tally }
    }
}

impl Store for EtcdStore {
    async fn claim(&self, candidate: &Candidate) -> Result<Holder, StorageError> {
        let claimed = self.claim_lease(candidate).await;
        self.tally.record(claimed, |counters| counters.claims += 1)
    }

    async fn resign(&self, candidate: &Candidate) -> Result<(), StorageError> {
        let resigned = self.give_back(candidate).await;
        self.tally.record(resigned, |_| {})
    }

    async fn open(&self, term: u64, opening: u64) -> Result<Image, StorageError> {
        let mut log = self.log.lock().await;
        if log.as_ref().is_some_and(|log| log.position.is_before(term, opening)) {
            *log = None;
        }
        let mut chain = Chain::signed([&self.signer]);
        let opened = self.open_log(term, opening, &mut chain).await;
        let opened = opened.map(|(opened, image)| {
            *log = Some(opened);
            image
        });
        self.tally.record(opened, |counters| counters.openings += 1)
    }

    async fn append(&self, opening: u64, at: u64, record: Vec<u8>) -> Result<(), StorageError> {
        let appended = self.write(opening, async |log| self.append_record(log, at, &record).await);
        self.tally.record(appended.await, |counters| {
            counters.appends += 1;
            counters.appended_bytes += record.len() as u64;
        })
    }

    async fn snapshot(&self, opening: u64, snapshot: Vec<u8>) -> Result<(), StorageError> {
        let stored = self.write(opening, async |log| self.store_snapshot(log, &snapshot).await);
        self.tally.record(stored.await, |counters| {
            counters.snapshots += 1;
            counters.snapshot_bytes += snapshot.len() as u64;
        })
    }

    fn report(&self) -> Report {
        lock(&self.tally.0).clone()
    }
}

/// The lease.
impl EtcdStore {
    async fn claim_lease(&self, candidate: &Candidate) -> Result<Holder, Failure> {
        let known = *lock(&self.id);
        if let Some(id) = known
            && !self.client.keep_alive(self.lease_call(), id).await?
        {
            self.forget(id);
        }
        let found = self.client.range(self.lease_call(), get(&self.names.leader)).await?;
        let Some(leader) = found.kvs.first() else { return self.take_lease(candidate).await };
        let holder = self.holder(leader)?;
        let is_ours = holder.lease.holder == candidate.number;
        if is_ours && *lock(&self.id) != Some(leader.lease) {
            // An answer was lost, and with it the number of the lease.
            *lock(&self.id) = Some(leader.lease);
            if !self.client.keep_alive(self.lease_call(), leader.lease).await? {
                self.forget(leader.lease);
                return Err(Failure::unavailable("the lease has just run out"));
            }
        }
        Ok(holder)
    }

    fn forget(&self, id: i64) {
        lock(&self.id).take_if(|known| *known == id);
    }

    /// Makes the leader's key, if no other brain is faster.
    async fn take_lease(&self, candidate: &Candidate) -> Result<Holder, Failure> {
        let call = self.lease_call();
        let format = self.client.range(call, get(&self.names.format)).await?;
        check_format(format.kvs.first(), self.format)?;
        let known = *lock(&self.id);
        let id = match known {
            Some(id) => id,
            None => self.client.grant(call, self.lease.as_secs() as i64).await?,
        };
        *lock(&self.id) = Some(id);
        let key = self.names.leader.clone();
        let words = format!("{} {}", candidate.number, candidate.address);
        let value = self.signer.holder_text(&words).into_bytes();
        let request = TxnRequest {
            compare: vec![made_in(&key, 0)],
            success: vec![op(Request::RequestPut(PutRequest {
                key: key.clone(),
                value,
                lease: id,
            }))],
            failure: vec![op(Request::RequestRange(get(&key)))],
        };
        let answer = self.client.txn(call, request).await.inspect_err(|_| self.forget(id))?;
        let count = || self.tally.count(|counters| counters.leases_taken += 1);
        if answer.succeeded {
            count();
            let lease = Lease { holder: candidate.number, term: answer.revision() as u64 };
            return Ok(Holder { lease, address: candidate.address.clone() });
        }
        let faster = answer.found(0).ok_or_else(|| {
            Failure::unavailable("the lease went to another brain and ran out again")
        })?;
        match faster.lease == id {
            // Refused, since an attempt before was carried out.
            true => count(),
            false => self.forget(id),
        }
        self.holder(faster)
    }

    async fn give_back(&self, candidate: &Candidate) -> Result<(), Failure> {
        let found = self.client.range(self.lease_call(), get(&self.names.leader)).await?;
        let own = match found.kvs.first() {
            Some(leader) if self.holder(leader)?.lease.holder == candidate.number => leader.lease,
            _ => return Ok(()),
        };
        self.client.revoke(self.lease_call(), own).await?;
        self.forget(own);
        Ok(())
    }

    fn holder(&self, leader: &KeyValue) -> Result<Holder, Failure> {
        let text = std::str::from_utf8(&leader.value).ok();
        let words = text.and_then(|text| self.signer.holder_words(text));
        let holder = words.and_then(|words| signed::holder(words, leader.create_revision as u64));
        holder.ok_or_else(|| Failure::unsigned("etcd: the record of who leads"))
    }
}

fn check_format(format: Option<&KeyValue>, wanted: &str) -> Result<(), Failure> {
    match format {
        Some(format) if format.value == wanted.as_bytes() => Ok(()),
        Some(format) if format.value == UNSIGNED_FORMAT.as_bytes() => {
            Err(Failure::unsigned("etcd: the log, of format 1,"))
        }
        Some(format) => {
            let found = String::from_utf8_lossy(&format.value);
            Err(Failure::unavailable(format!(
                "the state in etcd is of format {found}, and this is format {wanted}: run the version that wrote it"
            )))
        }
        None => Ok(()),
    }
}

/// The log.
impl EtcdStore {
    async fn open_log(
        &self,
        term: u64,
        opening: u64,
        chain: &mut Chain<'_>,
    ) -> Result<(Log, Image), Failure> {
        let position = Position { term, opening, writes: 0 };
        let revision = self.shut_out(position).await?;
        let mut reader = Reader { store: self, revision, named: BTreeSet::new() };
        let mut log =
            Log { position, root: Signature::default(), pieces: BTreeMap::new(), has_parts: false };
        let mut image = Image::default();
        let snapshot = reader.keys(get(&self.names.snapshot)).await?;
        if let Some(snapshot) = snapshot.first() {
            let value = reader.value(&snapshot.value).await?;
            image.snapshot = chain.snapshot(&value)?.to_vec();
            log.root = chain.last();
        }
        for piece in reader.keys(below(&self.names.log, PAGE_RECORDS)).await? {
            let at = image.log.len() as u64;
            if piece.key != self.names.log_at(at) {
                return Err(Failure::unavailable(format!(
                    "etcd: no record at byte {at} of the log"
                )));
            }
            let value = reader.value(&piece.value).await?;
            let bytes = chain.record(at, &value)?;
            let length = bytes.len() as u64;
            log.pieces.insert(at, Piece { length, signature: chain.last() });
            image.log.extend_from_slice(bytes);
        }
        log.has_parts = !reader.named.is_empty();
        let unnamed = reader.unnamed().await?;
        for unnamed in unnamed.chunks(SWEPT) {
            let deletions = unnamed.iter().map(|name| delete(name.clone(), end_of_prefix(name)));
            self.commit(&mut log.position, deletions.collect()).await?;
        }
        Ok((log, image))
    }

    /// Makes every write of other openings fail, and returns the revision in which that was done.
    async fn shut_out(&self, own: Position) -> Result<i64, Failure> {
        let Names { leader, opening, format, .. } = &self.names;
        let read =
            || [leader, opening, format].map(|key| op(Request::RequestRange(get(key)))).to_vec();
        let mut is_sent = false;
        let mut seen = self
            .client
            .txn(self.log_call(), TxnRequest { success: read(), ..TxnRequest::default() })
            .await?;
        loop {
            check_format(seen.found(2), self.format)?;
            let last = seen.found(1).map(|last| Position::parse(&last.value)).transpose()?;
            if is_sent && last == Some(own) {
                // Refused, since an attempt before was carried out.
                return Ok(seen.revision());
            }
            self.check_term(own.term, seen.found(0))?;
            if let Some(last) = last.filter(|last| !last.is_before(own.term, own.opening)) {
                return Err(Failure::fenced(format!("{own} is overtaken by {last}")));
            }
            let compare = match last {
                Some(_) => value_is(opening, CompareResult::Less, &own.encode()),
                None => made_in(opening, 0),
            };
            let same_format = match seen.found(2) {
                Some(_) => value_is(format, CompareResult::Equal, self.format.as_bytes()),
                None => made_in(format, 0),
            };
            let request = TxnRequest {
                compare: vec![made_in(leader, own.term as i64), compare, same_format],
                success: vec![
                    put(opening.clone(), own.encode()),
                    put(format.clone(), self.format.as_bytes().to_vec()),
                ],
                failure: read(),
            };
            seen = self.client.txn(self.log_call(), request).await?;
            is_sent = true;
            if seen.succeeded {
                return Ok(seen.revision());
            }
        }
    }

    fn check_term(&self, term: u64, leader: Option<&KeyValue>) -> Result<(), Failure> {
        match leader {
            Some(leader) if leader.create_revision as u64 == term => Ok(()),
            _ => Err(Failure::fenced(format!("the lease of term {term} is lost"))),
        }
    }

    /// Carries out a write of that opening. While it is not known to be done or refused, the log
    /// counts as closed.
    async fn write(
        &self,
        opening: u64,
        write: impl AsyncFnOnce(&mut Log) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut log = self.log.lock().await;
        let Some(mut open) = log.take() else {
            return Err(Failure::unavailable("the log has to be opened again"));
        };
        if open.position.opening != opening {
            let reason = format!("opening {opening} is over: this is {}", open.position);
            *log = Some(open);
            return Err(Failure::fenced(reason));
        }
        let written = write(&mut open).await;
        if matches!(written, Ok(()) | Err(Failure { error: StorageError::Fenced, .. })) {
            *log = Some(open);
        }
        written
    }

    async fn append_record(&self, log: &mut Log, at: u64, record: &[u8]) -> Result<(), Failure> {
        let last = log.pieces.range(..at).next_back().map(|(start, piece)| (*start, *piece));
        let end = last.map_or(0, |(start, piece)| start + piece.length);
        if end < at {
            return Err(Failure::unavailable(format!("byte {at} is behind the log's end")));
        }
        let mut changes = Vec::new();
        let mut behind = last.map_or(log.root, |(_, piece)| piece.signature);
        let mut kept = None;
        if let Some((start, piece)) = last.filter(|_| end > at) {
            let revision = 0;
            let mut reader = Reader { store: self, revision, named: BTreeSet::new() };
            let found = reader.keys(get(&self.names.log_at(start))).await?;
            let found = found.first().ok_or_else(|| Failure::unavailable("a record is gone"))?;
            let value = reader.value(&found.value).await?;
            let before = log.pieces.range(..start).next_back();
            let before = before.map_or(log.root, |(_, piece)| piece.signature);
            let mut chain = Chain::behind(before, [&self.signer]);
            let bytes = chain.record(start, &value)?;
            if chain.last() != piece.signature {
                return Err(Failure::unavailable("a record was replaced"));
            }
            let bytes = &bytes[..(at - start) as usize];
            let (signature, value) = self.signer.record_value(&before, start, bytes);
            kept = Some((start, Piece { length: bytes.len() as u64, signature }));
            behind = signature;
            changes.push(put(self.names.log_at(start), self.value(log, &value).await?));
        }
        let key = self.names.log_at(at);
        let after = [&key[..], &[0]].concat();
        changes.push(delete(after, end_of_prefix(&self.names.log)));
        let (signature, value) = self.signer.record_value(&behind, at, record);
        changes.push(put(key, self.value(log, &value).await?));
        self.commit(&mut log.position, changes).await?;
        log.pieces.retain(|start, _| *start < at);
        log.pieces.extend(kept);
        log.pieces.insert(at, Piece { length: record.len() as u64, signature });
        Ok(())
    }

    async fn store_snapshot(&self, log: &mut Log, snapshot: &[u8]) -> Result<(), Failure> {
        let had_parts = log.has_parts;
        log.has_parts = false;
        let (root, value) = self.signer.snapshot_value(snapshot);
        let value = self.value(log, &value).await?;
        let mut changes = vec![
            put(self.names.snapshot.clone(), value.clone()),
            delete(self.names.log.clone(), end_of_prefix(&self.names.log)),
        ];
        if had_parts {
            // Names of parts rise, so all before the snapshot's belong to what is replaced.
            let end = match Value::parse(&value)? {
                Value::Parts { name, .. } => self.names.parts_of(name),
                Value::Whole(_) => end_of_prefix(&self.names.parts),
            };
            changes.push(delete(self.names.parts.clone(), end));
        }
        self.commit(&mut log.position, changes).await?;
        log.pieces.clear();
        log.root = root;
        Ok(())
    }

    /// Replaces snapshot and log by the same with the signatures of this store, and the format by
    /// this one, as one.
    async fn rewrite(&self, log: &mut Log, image: &Image) -> Result<(), Failure> {
        let mut changes = vec![put(self.names.format.clone(), FORMAT.as_bytes().to_vec())];
        let mut root = Signature::default();
        if !image.snapshot.is_empty() {
            let (signature, value) = self.signer.snapshot_value(&image.snapshot);
            changes.push(put(self.names.snapshot.clone(), self.value(log, &value).await?));
            root = signature;
        }
        if !image.log.is_empty() {
            let first = self.names.log_at(0);
            let behind = [&first[..], &[0]].concat();
            let (_, value) = self.signer.record_value(&root, 0, &image.log);
            changes.push(delete(behind, end_of_prefix(&self.names.log)));
            changes.push(put(first, self.value(log, &value).await?));
        }
        self.commit(&mut log.position, changes).await
    }

    /// What stands for the bytes: themselves, or the name under which their parts were written.
    async fn value(&self, log: &mut Log, bytes: &[u8]) -> Result<Vec<u8>, Failure> {
        if bytes.len() <= PART_BYTES {
            return Ok([&[WHOLE], bytes].concat());
        }
        log.has_parts = true;
        let name = log.position;
        for (part, bytes) in bytes.chunks(PART_BYTES).enumerate() {
            let key = self.names.part(name, part);
            self.commit(&mut log.position, vec![put(key, bytes.to_vec())]).await?;
        }
        let length = (bytes.len() as u64).to_be_bytes();
        Ok([&[PARTS], &name.encode()[..], &length].concat())
    }

    /// Carries out changes as one, if the log is still this opening's.
    async fn commit(
        &self,
        position: &mut Position,
        mut changes: Vec<RequestOp>,
    ) -> Result<(), Failure> {
        let Names { leader, opening, .. } = &self.names;
        let next = Position { writes: position.writes + 1, ..*position };
        changes.push(put(opening.clone(), next.encode()));
        let compare: Vec<Compare> = vec![
            made_in(leader, position.term as i64),
            value_is(opening, CompareResult::Equal, &position.encode()),
        ];
        let failure = [opening, leader].map(|key| op(Request::RequestRange(get(key)))).to_vec();
        let request = TxnRequest { compare, success: changes, failure };
        let answer = self.client.txn(self.log_call(), request).await?;
        let found = answer.found(0).map(|found| Position::parse(&found.value)).transpose()?;
        // Refused, but the count is that of this write: an attempt before was carried out.
        if !answer.succeeded && found != Some(next) {
            self.check_term(position.term, answer.found(1))?;
            return Err(Failure::fenced(format!("{position} is over")));
        }
        *position = next;
        Ok(())
    }
}

/// Reads keys and values as they were in one revision.
struct Reader<'a> {
    store: &'a EtcdStore,
    /// 0 is the newest.
    revision: i64,
    /// Parts that values name.
    named: BTreeSet<Vec<u8>>,
}

impl Reader<'_> {
    /// All keys of a range, page by page.
    async fn keys(&self, mut range: RangeRequest) -> Result<Vec<KeyValue>, Failure> {
        range.revision = self.revision;
        let mut found: Vec<KeyValue> = Vec::new();
        loop {
            let mut page = self.store.client.range(self.store.log_call(), range.clone()).await?;
            found.append(&mut page.kvs);
            match found.last() {
                Some(last) if page.more => range.key = [&last.key[..], &[0]].concat(),
                _ => return Ok(found),
            }
        }
    }

    /// The bytes that a value stands for.
    async fn value(&mut self, value: &[u8]) -> Result<Vec<u8>, Failure> {
        let (name, length) = match Value::parse(value)? {
            Value::Whole(bytes) => return Ok(bytes.to_vec()),
            Value::Parts { name, length } => (name, length),
        };
        let key = self.store.names.parts_of(name);
        let parts = self.keys(below(&key, PAGE_PARTS)).await?;
        let bytes: Vec<u8> = parts.into_iter().flat_map(|part| part.value).collect();
        if bytes.len() as u64 != length {
            return Err(Failure::unavailable("etcd: parts of a long value are missing"));
        }
        self.named.insert(key);
        Ok(bytes)
    }

    /// Parts that no value names, after all values were read.
    async fn unnamed(&self) -> Result<Vec<Vec<u8>>, Failure> {
        let all = RangeRequest { keys_only: true, ..below(&self.store.names.parts, PAGE_NAMES) };
        let mut names: Vec<Vec<u8>> = Vec::new();
        for part in self.keys(all).await? {
            let slash = part.key.iter().rposition(|byte| *byte == b'/').unwrap_or_default();
            let name = &part.key[..=slash];
            if !self.named.contains(name) && names.last().is_none_or(|last| last != name) {
                names.push(name.to_vec());
            }
        }
        Ok(names)
    }
}

/// The log as it was opened.
#[derive(Debug)]
struct Log {
    position: Position,
    /// The signature of the snapshot, if there is one.
    root: Signature,
    /// Records by where they begin.
    pieces: BTreeMap<u64, Piece>,
    /// Whether there may be long values.
    has_parts: bool,
}

/// A record of the log.
#[derive(Clone, Copy, Debug)]
struct Piece {
    length: u64,
    signature: Signature,
}

/// What the opening's key says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Position {
    term: u64,
    opening: u64,
    /// How often the opening wrote.
    writes: u64,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "opening {} of term {}", self.opening, self.term)
    }
}

impl Position {
    /// Whether an opening comes after this one.
    fn is_before(&self, term: u64, opening: u64) -> bool {
        (self.term, self.opening) < (term, opening)
    }

    /// Its bytes, in the order of positions.
    fn encode(self) -> Vec<u8> {
        [self.term, self.opening, self.writes].map(u64::to_be_bytes).concat()
    }

    fn parse(bytes: &[u8]) -> Result<Position, Failure> {
        let malformed = || Failure::unavailable("etcd: a position of the log is malformed");
        let (words, rest) = bytes.as_chunks::<8>();
        let &[term, opening, writes] = words else { return Err(malformed()) };
        let [term, opening, writes] = [term, opening, writes].map(u64::from_be_bytes);
        if rest.is_empty() { Ok(Position { term, opening, writes }) } else { Err(malformed()) }
    }
}

const WHOLE: u8 = 0;
const PARTS: u8 = 1;

/// What is under a key that stands for bytes.
enum Value<'a> {
    Whole(&'a [u8]),
    Parts { name: Position, length: u64 },
}

impl Value<'_> {
    fn parse(value: &[u8]) -> Result<Value<'_>, Failure> {
        let malformed = || Failure::unavailable("etcd: a value of the log is malformed");
        match value.split_first() {
            Some((&WHOLE, bytes)) => Ok(Value::Whole(bytes)),
            Some((&PARTS, bytes)) => {
                let (name, length) = bytes.split_last_chunk().ok_or_else(malformed)?;
                let (name, length) = (Position::parse(name)?, u64::from_be_bytes(*length));
                Ok(Value::Parts { name, length })
            }
            _ => Err(malformed()),
        }
    }
}

#[derive(Debug)]
struct Names {
    format: Vec<u8>,
    leader: Vec<u8>,
    opening: Vec<u8>,
    snapshot: Vec<u8>,
    log: Vec<u8>,
    parts: Vec<u8>,
}

impl Names {
    fn new(prefix: &str) -> Names {
        let key = |name: &str| format!("{prefix}{name}").into_bytes();
        Names {
            format: key("format"),
            leader: key("leader"),
            opening: key("opening"),
            snapshot: key("snapshot"),
            log: key("log/"),
            parts: key("parts/"),
        }
    }

    fn log_at(&self, at: u64) -> Vec<u8> {
        [&self.log[..], format!("{at:016x}").as_bytes()].concat()
    }

    fn parts_of(&self, name: Position) -> Vec<u8> {
        let Position { term, opening, writes } = name;
        let name = format!("{term:016x}-{opening:016x}-{writes:016x}/");
        [&self.parts[..], name.as_bytes()].concat()
    }

    fn part(&self, name: Position, part: usize) -> Vec<u8> {
        [&self.parts_of(name)[..], format!("{part:08x}").as_bytes()].concat()
    }
}
