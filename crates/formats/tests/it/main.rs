//! Datasets in all formats: written, read back, converted, damaged.

mod choice;
mod damage;
mod golden;
mod kit;
mod pairs;
mod resume;
mod targets;
mod weights;
mod wild;
