//! Machines by a file of their rates.

use std::path::Path;

use dormouse_schedule::Machine;

use crate::files::{DescriptionError, fields, object};

/// The machine of a file: the fields of a [`Machine`], those that are not there unknown.
pub(crate) fn read(file: &Path) -> Result<Machine, DescriptionError> {
    let object = object(file, "a file of rates, such as examples/plan/machine.json")?;
    fields(file, object, &Machine::default())
}
