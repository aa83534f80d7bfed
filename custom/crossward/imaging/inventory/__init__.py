"""What a folder of DICOM files holds."""
