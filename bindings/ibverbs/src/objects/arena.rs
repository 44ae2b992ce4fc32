//! Objects that programs hold pointers to: liveness, and memory that never changes its type.
//!
//! A program may pass any pointer: null, that of a destroyed object, or garbage. Every kind of
//! object has an [`Arena`]. Control calls look the pointer up among the live objects; calls on the
//! data path only check the object's own mark. To make this safe for stale pointers, the memory of
//! an object is never freed: it is reused for the same kind only, and not before [`QUARANTINE`]
//! others of its kind have been destroyed after it. Descriptors and buffers of an object are
//! released when it is destroyed, not with its memory.

use std::collections::{BTreeMap, VecDeque};
use std::ptr::NonNull;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;

use crate::abi::ibv_context;
use crate::process::fork::{self, ForkLock};

/// Destroyed objects of one kind that keep their memory before the oldest one's is reused.
const QUARANTINE: usize = 64;

/// An object with a C structure in it that programs see.
pub(crate) trait Object: Sized + 'static {
    /// The C structure.
    type C;
    /// Its offset in `Self`.
    const OFFSET: usize;

    /// The arena of this kind.
    fn arena() -> &'static Arena<Self>;
    /// The mark that shows whether it is live.
    fn mark(&self) -> &Mark;
    /// The context it belongs to.
    fn owner(&self) -> *mut ibv_context;

    /// The handle that programs hold.
    fn handle(&self) -> *mut Self::C {
        std::ptr::from_ref(self)
            .cast::<u8>()
            .wrapping_add(Self::OFFSET)
            .cast::<Self::C>()
            .cast_mut()
    }
}

/// Whether an object is live, and in which process: the generation, 0 for none.
#[derive(Debug, Default)]
pub(crate) struct Mark(AtomicU32);

impl Mark {
    fn set(&self, alive: bool) {
        self.0.store(if alive { fork::generation() } else { 0 }, Ordering::Release);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire) == fork::generation()
    }

    /// It is live, but in an ancestor of this process.
    fn is_inherited(&self) -> bool {
        !self.is_set() && self.0.load(Ordering::Acquire) != 0
    }
}

/// All objects of one kind.
pub(crate) struct Arena<T> {
    objects: ForkLock<Objects<T>>,
}

struct Objects<T> {
    /// By the address that programs hold.
    living: BTreeMap<usize, NonNull<T>>,
    retired: VecDeque<NonNull<T>>,
    /// Set in a child whose parent was changing its list when it forked: handles that are not in it
    /// may be the parent's.
    incomplete: bool,
}

// SAFETY: the arena hands out shared references only; its list has a lock.
unsafe impl<T: Sync> Sync for Arena<T> {}

impl<T> Objects<T> {
    const fn new() -> Objects<T> {
        Objects { living: BTreeMap::new(), retired: VecDeque::new(), incomplete: false }
    }
}

impl<T: Object> Arena<T> {
    pub(crate) const fn new() -> Arena<T> {
        Arena { objects: ForkLock::new(Objects::new()) }
    }

    fn lock(&self) -> MutexGuard<'_, Objects<T>> {
        self.objects.lock()
    }

    /// In a child: memory of objects that the parent destroyed is not reused, as nothing of the
    /// parent's is dropped. With `adopt` its live objects become the child's as well.
    ///
    /// # Safety
    /// As [`ForkLock::renew`].
    pub(crate) unsafe fn renew(&self, adopt: bool) {
        let keep = |objects: &mut Objects<T>| {
            std::mem::forget(std::mem::take(&mut objects.retired));
            for place in objects.living.values().filter(|_| adopt) {
                // SAFETY: places are initialised and never freed.
                unsafe { place.as_ref() }.mark().set(true);
            }
        };
        // SAFETY: as the caller promises.
        unsafe { self.objects.renew(Objects { incomplete: true, ..Objects::new() }, keep) };
    }

    /// Creates an object.
    pub(crate) fn insert(&self, value: T) -> &'static T {
        let mut objects = self.lock();
        let reused = (objects.retired.len() > QUARANTINE).then(|| objects.retired.pop_front());
        let place = match reused.flatten() {
            Some(place) => {
                // SAFETY: retired places hold an initialised `T` that nothing valid refers to; it
                // is dropped once, here, before the new value takes its place.
                unsafe {
                    place.drop_in_place();
                    place.write(value);
                }
                place
            }
            None => NonNull::from(Box::leak(Box::new(value))),
        };
        // SAFETY: the place is initialised and never freed.
        let object = unsafe { place.as_ref() };
        objects.living.insert(object.handle() as usize, place);
        object.mark().set(true);
        object
    }

    /// The live object at `handle`.
    pub(crate) fn find(&self, handle: *mut T::C) -> Option<&'static T> {
        self.find_any(handle).filter(|object| object.mark().is_set())
    }

    /// The same, including objects inherited by a child.
    fn find_any(&self, handle: *mut T::C) -> Option<&'static T> {
        let place = *self.lock().living.get(&(handle as usize))?;
        // SAFETY: places are initialised and never freed.
        Some(unsafe { place.as_ref() })
    }

    /// The object at `handle`, if it is live. For the data path: `handle` must be null or one that
    /// an object of this kind has, or had.
    #[inline]
    pub(crate) fn peek(&self, handle: *mut T::C) -> Option<&'static T> {
        self.peek_any(handle).filter(|object| object.mark().is_set())
    }

    /// The same, including destroyed objects and those inherited by a child.
    #[inline]
    fn peek_any(&self, handle: *mut T::C) -> Option<&'static T> {
        if handle.is_null() {
            return None;
        }
        let place = handle.cast::<u8>().wrapping_sub(T::OFFSET).cast::<T>();
        // SAFETY: memory that once held an object of this kind does so for ever.
        Some(unsafe { &*place })
    }

    /// Retires an object; `false` if that had already happened.
    pub(crate) fn retire(&self, object: &'static T) -> bool {
        let mut objects = self.lock();
        object.mark().set(false);
        let place = objects.living.remove(&(object.handle() as usize));
        objects.retired.extend(place);
        place.is_some()
    }

    /// The live objects of one context.
    pub(crate) fn of_context(&self, context: *mut ibv_context) -> Vec<&'static T> {
        // SAFETY: places are initialised and never freed.
        let all = self
            .lock()
            .living
            .values()
            .map(|place| unsafe { place.as_ref() })
            .collect::<Vec<&'static T>>();
        all.into_iter().filter(|object| object.owner() == context).collect()
    }
}

/// The live object for a handle in a control call.
///
/// # Errors
/// `EINVAL` if there is none, `ENODEV` in a child for objects of its parent.
pub(crate) fn living<T: Object>(handle: *mut T::C) -> Result<&'static T, Errno> {
    let found = T::arena().find_any(handle);
    if found.is_none() && !handle.is_null() && T::arena().lock().incomplete {
        return Err(Errno::NODEV);
    }
    usable(found)
}

/// The same for calls on the data path.
#[inline]
pub(crate) fn peek<T: Object>(handle: *mut T::C) -> Result<&'static T, Errno> {
    usable(T::arena().peek_any(handle))
}

#[inline]
fn usable<T: Object>(found: Option<&'static T>) -> Result<&'static T, Errno> {
    match found {
        Some(object) if object.mark().is_set() => Ok(object),
        Some(object) if object.mark().is_inherited() => Err(Errno::NODEV),
        _ => Err(Errno::INVAL),
    }
}

/// Implements [`Object`] for a type with fields `mark` and `owner`; its C structure is its field
/// `c`, or the one named.
macro_rules! object {
    ($name:ident, $c:ty) => {
        $crate::objects::arena::object!($name, $c, c);
    };
    ($name:ident, $c:ty, $($place:ident).+) => {
        // SAFETY: it changes through atomics, locks, and cells protected by a lock; programs may
        // change its C structure where the verbs let them.
        unsafe impl Sync for $name {}

        impl $crate::objects::arena::Object for $name {
            type C = $c;
            const OFFSET: usize = core::mem::offset_of!($name, $($place).+);

            fn arena() -> &'static $crate::objects::arena::Arena<$name> {
                static ARENA: $crate::objects::arena::Arena<$name> =
                    $crate::objects::arena::Arena::new();
                &ARENA
            }

            fn mark(&self) -> &$crate::objects::arena::Mark {
                &self.mark
            }

            fn owner(&self) -> *mut $crate::abi::ibv_context {
                self.owner
            }
        }
    };
}
pub(crate) use object;
