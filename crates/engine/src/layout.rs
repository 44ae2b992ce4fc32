//! From a request to a stream: checks names and plan, compiles the plan to stages, computes the
//! order of samples.

use std::collections::HashMap;
use std::path::Path;

use formats::settle;
use host::ring::MAX_READERS;
use service::error::Error;
use xio::dataset::{BYTES, Dtype, Format, TokenFile};
use xio::documents::Documents;
use xio::order::megatron::MegatronError;
use xio::order::{Cut, OrderError, PackingError, SampleLayout, StreamOrder};
use xio::plan::{Labels, Narrow, Overflow, Plan};
use xio::reader::{Delivery, LeaveOut, Reader, ReaderSetup, ReaderSource, Share};
use xio::stage::{Branch, CompileError, Pipeline};

use crate::proto::{DatasetInfo, DatasetRef, OpenRequest, Opened};

/// Everything that decides the bytes of a stream.
#[derive(Debug)]
pub struct Layout {
    /// The plan, printed back.
    pub plan: String,
    /// The order of samples.
    pub order: StreamOrder,
    /// Datasets, in the order of the blend; then the loss weights of those that have some, if they
    /// are delivered.
    pub sources: Vec<ReaderSource>,
    /// Their names, then those of their loss weights, as the sources are.
    pub names: Vec<String>,
    /// What to deliver.
    pub delivery: Delivery,
    /// What of it not to deliver.
    pub left_out: LeaveOut,
}

impl Layout {
    /// Bytes of staging buffers that the stream needs. Preparing its schedule costs time that grows
    /// with them, so they are checked first.
    pub fn memory_needed(&self) -> u64 {
        Reader::memory_needed(&self.order, &self.sources)
    }

    /// Prepares the stream; takes as long as the plan asks for.
    pub fn setup(self) -> ReaderSetup {
        ReaderSetup::leaving_out(self.order, self.sources, self.delivery, &self.left_out)
    }

    /// What a trainer is told about the stream, its datasets and its table.
    pub fn opened(&self, mut datasets: Vec<DatasetInfo>, table: Option<DatasetInfo>) -> Opened {
        for (info, source) in datasets.iter_mut().zip(&self.sources) {
            info.samples = source.layout.samples;
            match &source.cut {
                Cut::Packed(packing) => {
                    info.packed_samples = packing.samples();
                    info.packed_tokens = packing.tokens();
                }
                Cut::Listed => info.samples = 0,
                Cut::Windows | Cut::Through(_) => {}
            }
        }
        Opened {
            table,
            datasets,
            plan: self.plan.clone(),
            dtype: self.delivery.dtype.to_string(),
            batch_samples: self.delivery.batch_samples,
            window_tokens: self.delivery.row_tokens(),
            pairs: self.delivery.rows.pairs,
            positions: self.delivery.rows.positions,
            loss_weights: self.delivery.rows.loss_weights.is_some(),
        }
    }
}

/// Parses a plan; the error points at the mistake.
pub(crate) fn parse(text: &str) -> Result<Plan, Error> {
    Plan::parse(text, None).map_err(|error| {
        let shown = format!("invalid plan\n{}", error.render(text));
        match error.hint() {
            // The rendered text ends with the hint.
            Some(hint) => {
                let end = shown.len().saturating_sub("\nhint: ".len() + hint.len());
                Error::invalid(&shown[..end]).hint(hint)
            }
            None => Error::invalid(shown).hint("`dquant cat --help` shows plans"),
        }
    })
}

/// Checks the description of a dataset by its target. Bytes are never taken for tokens: they have
/// to be asked for.
fn token_file((info, asked): (&DatasetInfo, &DatasetRef)) -> Result<TokenFile, Error> {
    let bad = |why: &str| Error::invalid(format!("{}: the target's description: {why}", info.name));
    let is_asked = |dtype: &Dtype| (*dtype == Dtype::U8) == (asked.dtype == BYTES);
    let dtype = Dtype::from_name(&info.dtype).filter(|dtype| dtype.is_streamed());
    let dtype = dtype.filter(is_asked);
    let dtype = dtype.ok_or_else(|| bad("its token type is unknown"))?;
    let bytes = info.tokens.checked_mul(u64::from(dtype.bytes()));
    let end = bytes.and_then(|bytes| bytes.checked_add(info.data_offset));
    if end.is_none_or(|end| end > i64::MAX as u64) {
        return Err(bad("it exceeds the largest file size"));
    }
    let (tokens, data_offset) = (info.tokens, info.data_offset);
    Ok(TokenFile { dtype, data_offset, tokens, format: Format::Flat })
}

/// Whether samples are whole records of the file, all of which are samples.
fn check_records(info: &DatasetInfo, window: u32) -> Result<(), Error> {
    let DatasetInfo { name, record_bytes, tokens: bytes, .. } = info;
    if *record_bytes > 0 && !u64::from(window).is_multiple_of(*record_bytes) {
        let text = format!("{name}: a record has {record_bytes} bytes, window({window}) cuts it");
        let hint = format!("a sample is a record, or several: window({record_bytes})");
        return Err(Error::invalid(text).hint(hint));
    }
    match bytes % u64::from(window) {
        0 => Ok(()),
        left => {
            let text = format!(
                "{name}: its {bytes} bytes are no multiple of window({window}), {left} are left over"
            );
            Err(Error::invalid(text)
                .hint("window(N) has to be the bytes of a record, or of several"))
        }
    }
}

/// Slots begin at pages.
const PAGE_BYTES: u64 = 4_096;

/// Most trainers that read a stream together: each costs a few descriptors.
const MAX_TRAINERS: u32 = 64;

/// Longest name of a group, in bytes.
const MAX_GROUP_NAME: usize = 256;

/// The share of a request, checked.
pub(crate) fn share(request: &OpenRequest) -> Result<Share, Error> {
    let Some(ranks) = &request.ranks else {
        return Ok(Share::WHOLE);
    };
    let share = Share { ranks: ranks.ranks, first: ranks.first, count: ranks.count };
    let bad = |why: String| Err(Error::invalid(why).hint("ranks count from 0"));
    if !share.is_valid() || share.count > MAX_TRAINERS {
        let Share { ranks, first, count } = share;
        return bad(format!("ranks {first} to {} of {ranks}", u64::from(first) + u64::from(count)));
    }
    if !(share.first..share.first + share.count).contains(&ranks.rank) {
        return bad(format!("rank {} is not one of those of this machine", ranks.rank));
    }
    if ranks.reader >= ranks.readers {
        return bad(format!("reader {} of {}", ranks.reader, ranks.readers));
    }
    if share.count.saturating_mul(ranks.readers) > MAX_TRAINERS.min(MAX_READERS) {
        let why = format!(
            "{} ranks with {} trainers each are more than {MAX_TRAINERS} trainers",
            share.count, ranks.readers
        );
        return Err(
            Error::invalid(why).hint("give the ranks of this machine, not those of the job")
        );
    }
    if ranks.group.len() > MAX_GROUP_NAME {
        return bad(format!("the group's name has more than {MAX_GROUP_NAME} bytes"));
    }
    if ranks.group.is_empty() && (ranks.count, ranks.readers) != (1, 1) {
        let why = "several trainers are to read one stream, but it has no name";
        return Err(Error::invalid(why).hint("give all of them the same group=\"NAME\""));
    }
    Ok(share)
}

/// The datasets of a stream, divided into samples as its plan says.
#[derive(Debug)]
pub struct Divided {
    /// In the order of the blend.
    pub layouts: Vec<SampleLayout>,
    /// How samples are cut from each.
    pub cuts: Vec<Cut>,
    /// Their documents, where these decide the order.
    documents: Vec<Documents>,
}

impl Divided {
    /// Takes the sizes of blocks from a plan that has got its blend: they depend on it where
    /// datasets are many.
    pub(crate) fn in_blocks_of(&mut self, plan: &Plan) -> Result<(), OrderError> {
        if plan.pack().is_none() && plan.megatron().is_none() {
            for (dataset, layout) in self.layouts.iter_mut().enumerate() {
                *layout = plan.layout(dataset, layout.file)?;
            }
        }
        Ok(())
    }
}

/// Divides datasets into samples, which depends on the whole plan but the weights above 0 of its
/// blend. `asked` are the requests that `infos` answer; `documents` are theirs if the plan needs
/// them, else there are none.
///
/// # Errors
/// When the plan has no samples of a dataset, and names it.
pub fn divide(
    plan: &Plan,
    infos: &[DatasetInfo],
    asked: &[DatasetRef],
    documents: Vec<Documents>,
) -> Result<Divided, Error> {
    if infos.len() != asked.len() {
        let why = format!("{} datasets described, {} asked for", infos.len(), asked.len());
        return Err(Error::invalid(why));
    }
    check_selection(plan)?;
    check_tokenizers(plan, infos)?;
    check_parts(plan, infos)?;
    check_targets(plan, infos)?;
    check_loss_weights(plan, infos)?;
    let is_one_of_many = plan.blend().is_empty() && infos.len() > 1;
    let mut layouts = Vec::with_capacity(infos.len());
    for (dataset, (info, asked)) in infos.iter().zip(asked).enumerate() {
        let file = token_file((info, asked))?;
        if file.dtype == Dtype::U8 {
            check_records(info, plan.window())?;
        }
        let layout = match plan.layout(dataset, file) {
            // Of several files that are blended by their samples, one without any is drawn from as
            // often as that.
            Err(OrderError::NoSample { .. } | OrderError::EmptyPart { .. }) if is_one_of_many => {
                without_samples(plan, file)
            }
            layout => layout.map_err(|error| undivided(&info.name, &error))?,
        };
        layouts.push(layout);
    }
    if plan.megatron().is_some() {
        check_sequences(infos)?;
        let cuts = vec![Cut::Listed; layouts.len()];
        return Ok(Divided { layouts, cuts, documents });
    }
    let cuts = cut(plan, &mut layouts, documents, infos)?;
    Ok(Divided { layouts, cuts, documents: Vec::new() })
}

/// Labels of datasets that say which of their tokens are targets: that others are trained on should
/// be nobody's surprise.
fn check_targets(plan: &Plan, infos: &[DatasetInfo]) -> Result<(), Error> {
    let mut drawn = (0..).zip(infos).filter(|(dataset, _)| plan.draws(*dataset));
    match plan.labels() {
        Some(Labels::Targets) if !drawn.any(|(_, info)| info.has_targets) => {
            let text = "labels=targets, but no dataset says which of its tokens are targets";
            Err(Error::invalid(text).hint(
                "write one with `dquant tokenize --chat` or `dquant convert --targets COLUMN`, put the manifest of a copied one \
                 back beside it, or leave labels out",
            ))
        }
        Some(Labels::Targets) => {
            // What a copy without its manifest looks like: every token would be a label.
            let is_unsaid = |info: &DatasetInfo| {
                let all = info.document_count + info.filtered_documents + info.duplicate_documents;
                info.content == 0 && info.single_sequence_documents < all
            };
            match drawn.find(|(_, info)| is_unsaid(info)) {
                None => Ok(()),
                Some((_, DatasetInfo { name, .. })) => {
                    let text = format!(
                        "{name}: its documents have several sequences, and no manifest says whether they take turns"
                    );
                    Err(Error::invalid(text).hint(
                        "put its manifest back beside it; one that says they do not: dquant inspect FILE --write-manifest",
                    ))
                }
            }
        }
        None if plan.pairs() => match drawn.find(|(_, info)| info.has_targets) {
            None => Ok(()),
            Some((_, DatasetInfo { name, .. })) => {
                let text = format!(
                    "{name}: says which of its tokens are targets, but the plan would deliver all labels"
                );
                Err(Error::invalid(text).hint(
                    "labels=targets with ignore=-100 leaves the others out, labels=all delivers them, too",
                ))
            }
        },
        _ => Ok(()),
    }
}

/// The loss weights of those datasets that have some, where the plan delivers them, with their
/// places in the blend.
pub(crate) fn loss_weights<'a>(
    plan: &Plan,
    infos: &'a [DatasetInfo],
) -> impl Iterator<Item = (usize, &'a DatasetInfo)> + use<'a> {
    let asked = plan.loss_weights().map_or(0, |_| infos.len());
    let infos = infos.iter().enumerate().take(asked);
    infos.filter_map(|(at, info)| Some((at, info.loss_weights.as_deref()?)))
}

/// Whether every dataset that is drawn from has loss weights where the plan delivers them, one for
/// each token.
fn check_loss_weights(plan: &Plan, infos: &[DatasetInfo]) -> Result<(), Error> {
    let Some(asked) = plan.loss_weights() else {
        return Ok(());
    };
    for (dataset, info) in infos.iter().enumerate() {
        let Some(weights) = info.loss_weights.as_deref() else {
            if asked.missing.is_some() || !plan.draws(dataset) {
                continue;
            }
            let name = settle::loss_weights_of(Path::new(&info.name));
            let text = format!("{} has no loss weights: there is no {}", info.name, name.display());
            return Err(Error::invalid(text).hint(
                "write them with `dquant convert --loss-weights COLUMN`, or say what such tokens weigh: loss_weights(missing=1), in \
                 Python missing_weight=1",
            ));
        };
        let end = weights.tokens.checked_mul(Dtype::F32.bytes().into());
        let end = end.and_then(|bytes| bytes.checked_add(weights.data_offset));
        let is_sound = weights.dtype == Dtype::F32.name()
            && weights.tokens == info.tokens
            && end.is_some_and(|end| end <= i64::MAX as u64);
        if !is_sound {
            let why = format!("{}: the target's description is of no loss weights", weights.name);
            return Err(Error::invalid(why));
        }
    }
    Ok(())
}

/// A file from which no sample is drawn.
fn without_samples(plan: &Plan, file: TokenFile) -> SampleLayout {
    let (window, overlap) = (plan.window(), plan.overlap());
    SampleLayout::without_samples(file, window, overlap)
}

/// Lays out the stream. `infos` describe the datasets of the request, in the order of the blend;
/// `divided` are the same; tables of an order take at most `order_bytes`; `compile` decides where
/// the plan's stages run.
pub fn plan(
    request: &OpenRequest,
    infos: &[DatasetInfo],
    divided: Divided,
    order_bytes: u64,
    compile: impl Fn(&Plan, &[Dtype]) -> Result<Pipeline, CompileError>,
) -> Result<Layout, Error> {
    let plan = parse(&request.plan)?;
    let Divided { layouts, cuts, documents } = divided;
    let expected = plan.blend().len().max(1);
    if infos.len() != expected || layouts.len() != expected {
        let why = format!("{} datasets for a plan over {expected}", infos.len());
        return Err(Error::invalid(why));
    }
    if request.leave_out.is_empty() {
        check_ids(&plan, infos)?;
    }
    let dtypes: Vec<Dtype> = layouts.iter().map(|layout| layout.file.dtype).collect();
    let mut names: Vec<String> = infos.iter().map(|info| info.name.clone()).collect();
    let pipeline = compile(&plan, &dtypes).map_err(|error| types(&error, &names))?;
    let order: StreamOrder = match plan.megatron_order(documents, order_bytes) {
        Some(order) => order.map_err(|error| unlisted(&error, &names))?.into(),
        None => pipeline.order(&layouts).map_err(Error::invalid)?.into(),
    };
    let source =
        |(index, ((layout, cut), branch)): (u32, ((&SampleLayout, Cut), &Branch))| ReaderSource {
            connection: 0,
            source: index,
            layout: *layout,
            cut,
            stages: branch.blocks().clone(),
            whole_pages: false,
            weighs: None,
        };
    let cuts = layouts.iter().zip(cuts).zip(pipeline.branches());
    let mut sources: Vec<ReaderSource> = (0..).zip(cuts).map(source).collect();
    if let Some(stages) = pipeline.loss_weights() {
        for (dataset, weights) in loss_weights(&plan, infos) {
            let of = sources[dataset].loss_weights(weights.data_offset, stages.clone());
            sources.push(ReaderSource { source: sources.len() as u32, ..of });
            names.push(weights.name.clone());
        }
    }
    let mut delivery = Delivery {
        window_tokens: pipeline.sample_tokens(),
        batch_samples: pipeline.batch_samples(),
        sample_dtype: pipeline.sample_dtype(),
        dtype: pipeline.dtype(),
        rows: pipeline.rows(),
        first_batch: request.first_batch,
        batches: (request.batches > 0).then_some(request.batches),
        shift: request.shift,
        share: share(request)?,
        slot_bytes: request.slot_bytes,
    };
    if delivery.slot_bytes == 0 {
        delivery.slot_bytes = slot_for(delivery.batch_bytes());
    }
    check_slot(&delivery)?;
    check_end(&mut delivery, &order)?;
    check_numbers(&delivery)?;
    let left_out = left_out(request, &delivery)?;
    Ok(Layout { plan: plan.to_string(), order, sources, names, delivery, left_out })
}

/// What a request leaves out: whole steps of all ranks.
fn left_out(request: &OpenRequest, delivery: &Delivery) -> Result<LeaveOut, Error> {
    let left_out = request.leave_out.iter().map(|range| range.first..range.end);
    let left_out = LeaveOut::new(left_out).map_err(|error| {
        Error::invalid(error).hint("a range is FIRST..END, its last batch is END - 1")
    })?;
    if !left_out.is_of_steps(delivery.first_batch, delivery.share.ranks) {
        let ranks = delivery.share.ranks;
        let text = format!("the batches to leave out are no whole steps of {ranks} ranks");
        let first = delivery.first_batch;
        let hint =
            format!("begin and end ranges a multiple of {ranks} batches after batch {first}");
        return Err(Error::invalid(text).hint(hint));
    }
    Ok(left_out)
}

/// How samples are cut from each dataset; packed ones get the number of their samples.
fn cut(
    plan: &Plan,
    layouts: &mut [SampleLayout],
    documents: Vec<Documents>,
    infos: &[DatasetInfo],
) -> Result<Vec<Cut>, Error> {
    if !plan.needs_documents() {
        return Ok(vec![Cut::Windows; layouts.len()]);
    }
    let mut cuts = Vec::with_capacity(layouts.len());
    let datasets = layouts.iter_mut().zip(documents).zip(infos);
    for (dataset, ((layout, documents), info)) in datasets.enumerate() {
        let cut = match plan.cut(dataset, *layout, documents) {
            Err(PackingError::Empty) if plan.blend().is_empty() && infos.len() > 1 => {
                (SampleLayout { samples: 0, ..*layout }, Cut::Windows)
            }
            cut => cut.map_err(|error| unpacked(&info.name, &error))?,
        };
        *layout = cut.0;
        cuts.push(cut.1);
    }
    Ok(cuts)
}

/// Why the documents of a dataset cannot be packed.
fn unpacked(name: &str, error: &PackingError) -> Error {
    let hint = match error {
        PackingError::Sparse { .. } => {
            "write the documents that are kept to a file of their own: `dquant convert FILE NEW.idx` with the plan's filter \
             as --filter LIST or --keep LIST, and its dedup as --dedup within"
        }
        PackingError::Empty | PackingError::Beyond { .. } => {
            "`dquant inspect` shows what the index says"
        }
    };
    Error::invalid(format!("{name}: {error}")).hint(hint)
}

/// Why a file has no samples.
fn undivided(name: &str, error: &OrderError) -> Error {
    let hint = match error {
        OrderError::EmptyPart { .. } => "give the part a larger share, or the dataset weight 0",
        _ => "choose a smaller window(N); `dquant inspect FILE` shows how long a file is",
    };
    Error::invalid(format!("{name}: {error}")).hint(hint)
}

/// Windows are cut from whole files: they would hold the tokens of dropped documents.
fn check_selection(plan: &Plan) -> Result<(), Error> {
    if plan.selection().is_empty() || plan.pack().is_some() || plan.megatron().is_some() {
        return Ok(());
    }
    let text =
        "filter and dedup drop documents, but the samples of this plan are windows of whole files";
    Err(Error::invalid(text)
        .hint("leave them out, or write what they keep to a file of its own: `dquant convert FILE NEW.idx` with --filter \
               LIST or --keep LIST, and --dedup within"))
}

/// The same id means another token in another vocabulary, so what a model would learn of such a
/// blend is noise. Nothing is said where a manifest does not name the vocabulary.
fn check_tokenizers(plan: &Plan, infos: &[DatasetInfo]) -> Result<(), Error> {
    if plan.mixes_tokenizers() {
        return Ok(());
    }
    let named = infos
        .iter()
        .enumerate()
        .filter(|(dataset, info)| plan.draws(*dataset) && !info.tokenizer.is_empty());
    let mut named = named.map(|(_, info)| info);
    let Some(first) = named.next() else { return Ok(()) };
    match named.find(|info| info.tokenizer != first.tokenizer) {
        None => Ok(()),
        Some(other) => {
            let text = format!(
                "{} holds ids of {}, but {} holds ids of {}: the same id is another token there",
                first.name, first.tokenizer, other.name, other.tokenizer
            );
            let hint = "blend datasets of one tokenizer; if this is meant, tokenizers(any) in the plan allows it";
            Err(Error::invalid(text).hint(hint))
        }
    }
}

/// Two parts of one hold-out in a stream would let a model learn what it is to be evaluated on.
fn check_parts(plan: &Plan, infos: &[DatasetInfo]) -> Result<(), Error> {
    let drawn = infos.iter().enumerate().filter(|(dataset, _)| plan.draws(*dataset));
    let drawn: Vec<&DatasetInfo> = drawn.map(|(_, info)| info).collect();
    let contents: HashMap<u64, &DatasetInfo> =
        drawn.iter().filter(|info| info.content != 0).map(|info| (info.content, *info)).collect();
    let pair = drawn.iter().find_map(|info| {
        Some((*info, *contents.get(&info.other_part).filter(|_| info.other_part != 0)?))
    });
    match pair {
        None => Ok(()),
        Some((one, other)) => {
            let text = format!(
                "{} and {} are the two parts of one hold-out: training on both is training on the validation data",
                one.name, other.name
            );
            Err(Error::invalid(text)
                .hint("give the validation part weight 0, or name the files one by one"))
        }
    }
}

/// Manifests tell the largest id and the smallest, so a plan that cannot deliver one is refused now
/// and not at the block that has it. A table, a module or a selection may leave it out.
///
/// # Errors
/// Names the dataset and the id.
pub fn check_ids(plan: &Plan, infos: &[DatasetInfo]) -> Result<(), Error> {
    let may_lack_it = !plan.selection().is_empty() || plan.split().is_some();
    if plan.remap().is_some() || plan.wasm().is_some() || may_lack_it {
        return Ok(());
    }
    for (dataset, info) in infos.iter().enumerate() {
        if let Some(id) = info.min_id.filter(|_| plan.draws(dataset))
            && let Some(Narrow { to, overflow: Overflow::Refuse }) = plan.narrow()
            && i128::from(id) < to.range().0
        {
            let text = format!("{} holds ids from {id} on, which narrow({to}) refuses", info.name);
            return Err(Error::invalid(text).hint(formats::BELOW_ZERO_HINT));
        }
        let Some(id) = info.max_id.filter(|_| plan.draws(dataset)) else { continue };
        if let Some(Narrow { to, overflow: Overflow::Refuse }) = plan.narrow()
            && i128::from(id) > to.range().1
        {
            let text = format!("{} holds ids up to {id}, which narrow({to}) refuses", info.name);
            let hint = format!(
                "leave narrow out, or say what becomes of such ids: narrow({to}, overflow=saturate(ID))"
            );
            return Err(Error::invalid(text).hint(hint));
        }
        if let Some(bits) = plan.bitpack()
            && id >> bits != 0
            && plan.narrow().is_none_or(|narrow| narrow.overflow == Overflow::Refuse)
        {
            let text = format!("{} holds ids up to {id}, which bitpack({bits}) refuses", info.name);
            let bits = u64::BITS - id.leading_zeros();
            return Err(
                Error::invalid(text).hint(format!("give tokens {bits} bits: bitpack({bits})"))
            );
        }
    }
    Ok(())
}

/// An error of the compiler, with the names of the files.
fn types(error: &CompileError, names: &[String]) -> Error {
    let name = |dataset: usize| names.get(dataset).map_or("?", String::as_str);
    match *error {
        CompileError::Count { .. }
        | CompileError::NoTable
        | CompileError::Id { .. }
        | CompileError::Stages(_)
        | CompileError::NoBatches { .. } => Error::invalid(error),
        CompileError::Positions { .. } => Error::invalid(error)
            .hint("positions are counted in the type of the tokens: narrow less, or add widen(i64)"),
        CompileError::Pack { .. } => Error::invalid(error).hint(
            "bitpack takes 9 to 31 bits, fewer than the type has: narrow(u32) | bitpack(17) for larger types",
        ),
        CompileError::NotTokens { dataset, holds, action } => {
            let (what, hint) = match holds.is_float() {
                true => (holds.name(), "values pass as they are, or through quantize: leave"),
                false => ("records", "records pass as they are: leave"),
            };
            let text = format!("{} holds {what}, and {action} is for tokens", name(dataset));
            Error::invalid(text).hint(format!("{hint} {action} out"))
        }
        CompileError::NotFloats { dataset, holds } => {
            let text = format!("{} holds {holds}, which quantize cannot round", name(dataset));
            Error::invalid(text).hint("quantize is for f32, f16 and bf16: name a flat file's type with --dtype f32")
        }
        CompileError::Narrow { dataset, from, to } => {
            let text = format!("{} holds {from}, which narrow({to}) cannot deliver", name(dataset));
            Error::invalid(text).hint("leave narrow out, or narrow further: narrow(u16)")
        }
        CompileError::Widen { from, to } => {
            Error::invalid(format!("samples hold {from}, which widen({to}) cannot deliver"))
                .hint("narrow first: narrow(u16) | widen(i64)")
        }
        CompileError::MixedTypes { first, dataset, other } => {
            let (one, another) = (name(0), name(dataset));
            let text = format!("{one} holds {first} but {another} holds {other}");
            let hint = match first.is_float() && other.is_float() {
                true => "deliver one type: quantize(e4m3, deliver=f32)",
                false => "deliver one type: add narrow(u16) or narrow(u32)",
            };
            Error::invalid(text).hint(hint)
        }
    }
}

/// Most bytes of tables of one stream that follows Megatron-core's order: about 7 * 10^7 samples.
pub(crate) const MAX_ORDER_TABLES: u64 = 1 << 30;

/// Why there is no order of Megatron-core over the datasets of these names.
fn unlisted(error: &MegatronError, names: &[String]) -> Error {
    let hint = match error {
        MegatronError::Memory { .. } => "lower samples= in order(megatron, …)",
        MegatronError::TooFew { .. } => "give each dataset a weight: blend(web=0.7, code=0.3)",
        MegatronError::NoTokens { .. } | MegatronError::NoSample { .. } => {
            "`dquant documents` shows what it has; split= of order(megatron, …) may leave a part of that"
        }
        _ => "docs/megatron.md says what Megatron-core needs",
    };
    match error.dataset().and_then(|dataset| names.get(dataset)) {
        Some(name) => Error::invalid(format!("{name}: {error}")).hint(hint),
        None => Error::invalid(error).hint(hint),
    }
}

/// Megatron-core shuffles sequences, and the tables of documents do not tell where those of a
/// document are.
fn check_sequences(infos: &[DatasetInfo]) -> Result<(), Error> {
    for info in infos {
        // Before a selection dropped some.
        let all = info.document_count + info.filtered_documents + info.duplicate_documents;
        if info.single_sequence_documents != all {
            let (name, others) = (&info.name, all.saturating_sub(info.single_sequence_documents));
            let text = format!(
                "{name}: {others} of its {all} documents are not one sequence of the index, but Megatron-core shuffles sequences"
            );
            let hint =
                "write it again with one sequence for each document: `dquant convert FILE NEW.idx`";
            return Err(Error::invalid(text).hint(hint));
        }
    }
    Ok(())
}

/// Ends a stream over an order that ends, after the last whole batch for every rank.
fn check_end(delivery: &mut Delivery, order: &StreamOrder) -> Result<(), Error> {
    let Some(samples) = order.samples() else {
        return Ok(());
    };
    let Delivery { batch_samples, shift, first_batch, share, .. } = *delivery;
    let all = samples.saturating_sub(shift.into()) / u64::from(batch_samples.max(1));
    let left = all.saturating_sub(first_batch) / u64::from(share.ranks);
    match delivery.batches {
        Some(batches) if batches > left => {
            let text = format!(
                "{batches} batches are asked for, the order has {left} from batch {first_batch} on"
            );
            Err(Error::invalid(text).hint("its samples= says how many samples there are"))
        }
        None if left == 0 => {
            let text = format!("the order has no batch for every rank from batch {first_batch} on");
            Err(Error::invalid(text).hint("its samples= says how many samples there are"))
        }
        Some(_) => Ok(()),
        None => {
            delivery.batches = Some(left);
            Ok(())
        }
    }
}

/// Most samples of a stream: no number of a sample, token or byte then exceeds 64 bits.
const MAX_SAMPLES: u64 = 1 << 53;

fn check_numbers(delivery: &Delivery) -> Result<(), Error> {
    let Delivery { first_batch, batch_samples, share, .. } = *delivery;
    let all = delivery.batches.unwrap_or(0).checked_mul(share.ranks.into());
    let last = all.and_then(|all| first_batch.checked_add(all));
    if delivery.shift >= batch_samples.max(1) {
        let text = format!("batches of {batch_samples} samples begin {} later", delivery.shift);
        return Err(Error::invalid(text).hint("count whole batches as batches"));
    }
    let most = MAX_SAMPLES / u64::from(batch_samples.max(1));
    if last.is_some_and(|last| last <= most) {
        return Ok(());
    }
    let count = delivery.batches.unwrap_or(0);
    let text =
        format!("{count} batches from batch {first_batch} on extend beyond the last, {most}");
    Err(Error::invalid(text).hint("--first-batch counts batches from 0; --batches how many follow"))
}

/// Bytes of a slot that nobody chose: enough for many batches where they are small, and for one
/// where it is large.
fn slot_for(batch_bytes: u64) -> u32 {
    const LEAST: u64 = 1 << 20;
    let slot = batch_bytes.max(LEAST).next_multiple_of(PAGE_BYTES);
    u32::try_from(slot).unwrap_or(u32::MAX)
}

fn check_slot(delivery: &Delivery) -> Result<(), Error> {
    let (batch, slot) = (delivery.batch_bytes(), delivery.slot_bytes);
    if batch <= u64::from(slot) {
        return Ok(());
    }
    Err(Error::invalid(format!("a batch of {batch} bytes does not fit a slot of {slot}"))
        .hint("make slots larger with --slot-size, or batches smaller with batch(N)"))
}
