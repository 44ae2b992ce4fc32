//! Work requests in C's terms: chains of them, handed to the library in batches.

use std::ffi::c_int;
use std::ptr;

use arrayvec::ArrayVec;
use roce::device::PostError;
use roce::verbs::{RecvWr, SendWr, Sge, ShortList, VerbsError};

use crate::abi::*;

/// Work requests handed to the library in one call.
const POST_BATCH: usize = 16;

/// A list of memory in C's terms.
fn list(sges: &[Sge]) -> ShortList<ibv_sge> {
    let pieces = sges.iter();
    pieces.map(|sge| ibv_sge { addr: sge.addr, length: sge.len, lkey: sge.lkey }).collect()
}

/// Passes a chain to `post`, which returns the library's result and the rejected request. Returns
/// how many were accepted of a chain that was not accepted whole, and why.
fn post_chain<T>(
    chain: &mut [T],
    next: impl Fn(&mut T) -> &mut *mut T,
    post: &mut impl FnMut(*mut T, *mut *mut T) -> c_int,
) -> Result<(), (usize, c_int)> {
    if chain.is_empty() {
        return Ok(());
    }
    let first = chain.as_mut_ptr();
    for index in 1..chain.len() {
        // One pointer for all, so that the library may follow it from request to request.
        *next(&mut chain[index - 1]) = first.wrapping_add(index);
    }
    let mut bad = ptr::null_mut();
    match post(first, &raw mut bad) {
        0 => Ok(()),
        // A library that rejects none of the chain has not said how many it accepted: none are
        // assumed.
        errno => {
            let accepted = chain.iter().position(|wr| ptr::eq(wr, bad));
            Err((accepted.unwrap_or(0), errno))
        }
    }
}

/// Posts receives; `refused` makes the error of a rejected request.
pub(super) fn receives(
    wrs: &[RecvWr],
    mut post: impl FnMut(*mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
    refused: impl Fn(c_int) -> VerbsError,
) -> Result<(), PostError> {
    for (batch, wrs) in wrs.chunks(POST_BATCH).enumerate() {
        let mut lists: ArrayVec<_, POST_BATCH> = wrs.iter().map(|wr| list(&wr.sges)).collect();
        let mut chain: ArrayVec<ibv_recv_wr, POST_BATCH> = wrs
            .iter()
            .zip(&mut lists)
            .map(|(wr, list)| ibv_recv_wr {
                wr_id: wr.wr_id,
                next: ptr::null_mut(),
                sg_list: list.as_mut_ptr(),
                num_sge: list.len() as c_int,
            })
            .collect();
        post_chain(&mut chain, |wr| &mut wr.next, &mut post).map_err(|(accepted, errno)| {
            PostError { accepted: batch * POST_BATCH + accepted, error: refused(errno) }
        })?;
    }
    Ok(())
}

/// Posts sends that `translate` puts in C's terms, but for their memory; up to the first for which
/// it cannot.
pub(super) fn sends(
    wrs: &[SendWr],
    translate: impl Fn(&SendWr) -> Result<ibv_send_wr, VerbsError>,
    mut post: impl FnMut(*mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int,
    refused: impl Fn(c_int) -> VerbsError,
) -> Result<(), PostError> {
    for (batch, wrs) in wrs.chunks(POST_BATCH).enumerate() {
        let before = batch * POST_BATCH;
        let mut lists: ArrayVec<_, POST_BATCH> = wrs.iter().map(|wr| list(&wr.sges)).collect();
        let mut chain = ArrayVec::<ibv_send_wr, POST_BATCH>::new();
        let mut unfit = Ok(());
        for (wr, list) in wrs.iter().zip(&mut lists) {
            match translate(wr) {
                Ok(c) => {
                    let (sg_list, num_sge) = (list.as_mut_ptr(), list.len() as c_int);
                    chain.push(ibv_send_wr { sg_list, num_sge, ..c });
                }
                Err(error) => {
                    unfit = Err(PostError { accepted: before + chain.len(), error });
                    break;
                }
            }
        }
        post_chain(&mut chain, |wr| &mut wr.next, &mut post).map_err(|(accepted, errno)| {
            PostError { accepted: before + accepted, error: refused(errno) }
        })?;
        unfit?;
    }
    Ok(())
}
